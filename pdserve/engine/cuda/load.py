"""Builds the best decoder for a GPU from the libraries that are available."""

from __future__ import annotations

import logging

from pdserve.engine.cuda.catalog import AttentionNeeds, choose_kind, triton_missing
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.parameters import DecoderWeights
from pdserve.engine.models.torch_decoder import TorchDecoder

_log = logging.getLogger(__name__)


def cuda_decoder(config: ModelConfig, weights: DecoderWeights, attention: str = "") -> Decoder:
    """Return a decoder for weights on a GPU: with our kernels, or plain torch without Triton.

    Args:
        config: the architecture.
        weights: on a GPU.
        attention: name of an attention backend; empty for the best one.

    Raises:
        ConfigError: the named backend cannot be used.
    """
    embedding = weights.embedding
    kind = choose_kind(attention, AttentionNeeds(embedding.dtype, config.head_dim))
    lacking = triton_missing()
    backend = kind.open(embedding.device)
    if lacking is not None:
        _log.warning("plain torch computes the model, several times slower: %s", lacking)
        return TorchDecoder(config, weights, backend)
    from pdserve.engine.cuda.decoder import CudaDecoder
    from pdserve.engine.cuda.recorder import CudaRecorder
    from pdserve.engine.cuda.staging import CudaCopies, Staging

    _log.info("attention on %s: %s", embedding.device, kind.name)
    staging = Staging(CudaCopies(embedding.device))
    recorder = CudaRecorder(embedding.device)
    return CudaDecoder(config, weights, backend, staging, recorder)
