"""The decoders of ranks on GPUs, and what of them differs on rank 0: it tells the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve import _native
from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.parameters import DecoderWeights
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.ranks.adapters import OtherRanks
from pdserve.engine.ranks.collectives import Collectives
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.engine.steps.batch import Batch
from pdserve.engine.steps.worst import LargestStep
from pdserve.protocol import Sickness
from pdserve.shared.errors import AdapterRefused, NodeSick


def make_decoder(
    config: ModelConfig,
    weights: DecoderWeights,
    ranks: Collectives,
    attention: str,
    *,
    has_graphs: bool,
    worst_step: LargestStep,
    tap_layers: tuple[int, ...] = (),
    kv_codes: bool = False,
) -> Decoder:
    """Return the decoder of one rank, on the device of its weights.

    Args:
        config: the architecture, of the whole model.
        weights: this rank's.
        ranks: this rank and the others.
        attention: as load_decoder.
        has_graphs: as load_decoder.
        worst_step: as load_decoder; the same on all ranks.
        tap_layers: as load_decoder; of one stage, rank 0's only, which has whole rows.
        kv_codes: as load_decoder.
    """
    if weights.embedding.device.type == "cpu":
        return TorchDecoder(config, weights, ReferenceAttention(), ranks)
    from pdserve.engine.cuda.load import cuda_decoder  # only where a GPU is asked for

    return cuda_decoder(
        config,
        weights,
        attention,
        has_graphs=has_graphs,
        worst_step=worst_step,
        ranks=ranks,
        tap_layers=tap_layers,
        kv_codes=kv_codes,
    )


class StepFollowers(Protocol):
    """The later hosts of a node (`device_hosts.LaterHosts`)."""

    def begin_step(self, step: NDArray[np.uint8]) -> None:
        """Send them a step, as it is in the step memory. Raises NodeSick: one is lost."""
        ...

    def end_step(self) -> NDArray[np.float32]:
        """Wait until they have computed it. Raises NodeSick: one is lost.

        Returns:
            [num_states, hidden_size], if the first rank of the last stage is on one of them; else
            none.
        """
        ...


class LeadingDecoder:
    """Rank 0's decoder, which has the other ranks compute each of its steps."""

    def __init__(
        self,
        decoder: Decoder,
        steps: StepMemory,
        adapters: OtherRanks,
        hosts: StepFollowers | None = None,
        *,
        has_stages: bool = False,
    ) -> None:
        """Lead the other ranks of this host, and those of the later `hosts`, if there are any.

        `adapters`: hands these to the other ranks of this host.
        """
        self.config = decoder.config
        self.sampler = decoder.sampler
        self._decoder = decoder
        self._steps = steps
        self._adapters = adapters
        self._hosts = hosts
        self._has_stages = has_stages

    @property
    def device(self) -> torch.device:
        """As Decoder.device."""
        return self._decoder.device

    @property
    def dtype(self) -> torch.dtype:
        """As Decoder.dtype."""
        return self._decoder.dtype

    @property
    def most_ahead(self) -> int:
        """As Decoder.most_ahead. The others launch their steps, too, and get the tokens in them."""
        return self._decoder.most_ahead

    def take_adapter(self, adapter: Adapter) -> None:
        """See Decoder.take_adapter."""
        if self._hosts is not None:
            raise AdapterRefused(
                "adapters are not computed by devices of several hosts: serve them on one"
            )
        self._decoder.take_adapter(adapter)
        try:
            self._adapters.take_adapter(adapter)
        except AdapterRefused:
            self._decoder.drop_adapter(adapter.digest)
            raise

    def drop_adapter(self, digest: str) -> None:
        """See Decoder.drop_adapter."""
        self._adapters.drop_adapter(digest)
        self._decoder.drop_adapter(digest)

    def logits(
        self, batch: Batch, kv_pool: Tensor, progress: LayerProgress | None = None
    ) -> Tensor | None:
        """See Decoder.logits.

        Raises:
            ValueError: the step is too large for the memory that ranks share.
            NodeSick: another rank has ended, or this one has left a step half done; no step can be
                computed any more.
        """
        shared = batch if self._has_stages else replace(batch, taps=None)
        self._steps.write(shared, reports_layers=progress is not None)
        if self._hosts is not None:  # first, as they are further away
            self._hosts.begin_step(self._steps.step.numpy())
        self._steps.group.begin_step()
        try:
            logits = self._decoder.logits(batch, kv_pool, progress)
            self._steps.group.end_step()
            self._take_states(batch)
        except _native.RanksLost as error:
            raise NodeSick(f"{Sickness.RANK_LOST}: {error}") from None
        except NodeSick:  # it could not meet another rank
            raise
        except Exception as error:
            raise NodeSick(f"{Sickness.RANK_LOST}: rank 0 has failed: {error}") from error
        return logits

    def _take_states(self, batch: Batch) -> None:
        """States of a step are made in the last stage, which may be another one than this."""
        from_hosts = None if self._hosts is None else self._hosts.end_step()
        if batch.states is None or not self._has_stages:
            return
        if from_hosts is not None and len(from_hosts):
            batch.states.out.copy_(torch.from_numpy(from_hosts))
        else:
            sizes = self.config.hidden_size, self.config.vocab_size
            batch.states.out.copy_(self._steps.states(*sizes))
