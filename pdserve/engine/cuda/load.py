"""Builds the best decoder for a GPU from the libraries that are available."""

from __future__ import annotations

import logging

import torch

from pdserve.engine.attention.interface import AttentionBackend
from pdserve.engine.cuda.catalog import KINDS, AttentionNeeds, choose_kind, triton_missing
from pdserve.engine.cuda.probe import check_attention
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.parameters import DecoderWeights
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.ranks.collectives import ALONE, Collectives

_log = logging.getLogger(__name__)


def cuda_decoder(
    config: ModelConfig,
    weights: DecoderWeights,
    attention: str = "",
    *,
    has_graphs: bool = True,
    ranks: Collectives = ALONE,
) -> Decoder:
    """Return a decoder for weights on a GPU: with our kernels, or plain torch without Triton.

    Args:
        config: the architecture, of the whole model.
        weights: on a GPU; this rank's.
        attention: name of an attention backend; empty for the best one that works.
        has_graphs: whether decode steps become CUDA graphs.
        ranks: this rank and the others.

    Raises:
        ConfigError: the named backend cannot be used.
    """
    embedding = weights.embedding
    needs = AttentionNeeds(embedding.dtype, config.head_dim)
    if attention:
        backend = choose_kind(attention, needs).open(embedding.device)
    else:
        backend = best_attention(needs, embedding.device)
    lacking = triton_missing()
    if lacking is not None:
        _log.warning("plain torch computes the model, several times slower: %s", lacking)
        return TorchDecoder(config, weights, backend, ranks)
    from pdserve.engine.cuda.decoder import CudaDecoder
    from pdserve.engine.cuda.recorder import CudaRecorder
    from pdserve.engine.cuda.staging import CudaCopies, Staging

    _log.info("attention on %s: %s", embedding.device, backend.name)
    staging = Staging(CudaCopies(embedding.device))
    recorder = CudaRecorder(embedding.device) if has_graphs else None
    return CudaDecoder(config, weights, backend, staging, recorder, ranks=ranks)


def best_attention(needs: AttentionNeeds, device: torch.device) -> AttentionBackend:
    """Return the first backend that computes what it should on this GPU."""
    for kind in KINDS:
        if kind.obstacle(needs) is not None:
            continue
        try:
            backend = kind.open(device)
            check_attention(backend, needs, device)
        except Exception:  # noqa: BLE001 - a library raises what its compiler does
            _log.exception("attention by %s does not work here: the next is tried", kind.name)
        else:
            return backend
    raise AssertionError("plain torch always works")
