"""Builds the best decoder for a GPU from the libraries that are available."""

from __future__ import annotations

import logging
from functools import partial

import torch

from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda.attention.catalog import AttentionNeeds, choose_kind, triton_missing
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.parameters import DecoderWeights
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.ranks.collectives import ALONE, Collectives
from pdserve.engine.steps.worst import ANY_STEP, LargestStep, largest_part

_log = logging.getLogger(__name__)


def cuda_decoder(
    config: ModelConfig,
    weights: DecoderWeights,
    attention: str = "",
    *,
    has_graphs: bool = True,
    worst_step: LargestStep = ANY_STEP,
    ranks: Collectives = ALONE,
    tap_layers: tuple[int, ...] = (),
    kv_codes: bool = False,
) -> Decoder:
    """Return a decoder for weights on a GPU: with our kernels, or plain torch without Triton.

    Args:
        config: the architecture, of the whole model.
        weights: on a GPU; this rank's.
        attention: name of an attention backend; empty for the fastest that works on rank 0.
        has_graphs: whether steps are replayed as CUDA graphs.
        worst_step: the largest step; there are graphs for as much, and memory to sample as many
            tokens at a time as it has requests.
        ranks: this rank and the others.
        tap_layers: as CudaDecoder.
        kv_codes: whether the pool will have codes.

    Raises:
        ConfigError: the named backend cannot be used.
        NodeSick: another rank has ended.
    """
    device = weights.embedding.device
    dtype = weights.embedding.dtype
    needs = AttentionNeeds.of(config, ranks.shard, dtype, kv_codes=kv_codes)
    named = choose_kind(attention, needs) if attention else None
    lacking = triton_missing()
    if lacking is not None:
        _log.warning("plain torch computes the model, several times slower: %s", lacking)
        return TorchDecoder(config, weights, ReferenceAttention(), ranks)  # no other can be named
    from pdserve.engine.cuda.attention.race import fastest_attention, opened
    from pdserve.engine.cuda.attention.triton_attention import TritonAttention
    from pdserve.engine.cuda.capture.graphs import buckets_for
    from pdserve.engine.cuda.capture.piece_sizes import piece_sizes
    from pdserve.engine.cuda.capture.recorder import CudaRecorder
    from pdserve.engine.cuda.copies.staging import CudaCopies, Staging
    from pdserve.engine.cuda.decoder import CudaDecoder
    from pdserve.engine.cuda.stopwatch import CudaStopwatch

    # Steps of models with states are launched: no graph knows where states are.
    new_recorder = None
    if has_graphs and config.recurrent is None:
        new_recorder = partial(CudaRecorder, device)

    def measured() -> str:
        names = fastest_attention(needs, device, CudaStopwatch(device), new_recorder).names
        torch.cuda.empty_cache()  # KV may have what was measured with
        return names

    with torch.cuda.device(device):
        if named is None:
            chosen = opened(ranks.agree("attention", measured), device)
        else:
            captured = named.name if named.open_captured is not None else TritonAttention.name
            chosen = opened(f"{named.name} {captured}", device)
        _log.info("attention on %s: %s", device, chosen.prompts.name)
        if chosen.decodes is None and new_recorder is not None:
            _log.warning("no CUDA graphs: no attention works in them here")
            new_recorder = None
        decoder = CudaDecoder(
            config,
            weights,
            chosen.prompts,
            Staging(CudaCopies(device)),
            None if new_recorder is None else new_recorder(),
            buckets_for(worst_step.num_requests),
            chosen.decodes,
            ranks,
            piece_sizes(largest_part(worst_step.num_tokens, ranks.shard.num_stages)),
            worst_step.num_requests,
            tap_layers=tap_layers,
        )
        decoder.warm_up()
    return decoder
