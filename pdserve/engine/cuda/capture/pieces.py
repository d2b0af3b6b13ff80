"""Steps with chunks of prompts as CUDA graphs in pieces: one launch a layer beside its attention.

Between two attentions nothing depends on anything but the number of rows: what is left of a layer
after its attention, and what the next one does before its own. So each such piece is captured, for
a few numbers of rows (`piece_sizes.py`). Attention, which knows lengths and block tables, is
launched between them, for the rows that there are.

Pieces hand on the rows in buffers, which those of all sizes share. What rows fill up to the next
size have no slot, and nobody reads their results.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.attention.interface import AttentionBackend
from pdserve.engine.cuda.capture.graphs import GraphRecording, Recorder
from pdserve.engine.cuda.layers.forward import Forward, ResidualStream, RowTaps
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.stage_ends import Finals
from pdserve.engine.rope import Angles
from pdserve.engine.steps.batch import Batch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Buffers:
    """What pieces read and write, for some number of rows."""

    token_ids: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    slots: Tensor  # [num_rows] int64; -1 for a row that fills up
    stream: ResidualStream
    query: Tensor  # [num_rows, num_heads, head_dim], of one layer after the other
    attended: Tensor  # [num_rows, num_heads, numbers of a value], likewise

    @classmethod
    def of(
        cls, own: ModelConfig, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> Buffers:
        """Allocate them, all rows filling ones. `own`: this rank's part of the model."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((num_rows, *shape), dtype=dtype, device=device)

        def numbers() -> Tensor:
            return zeros(dtype=torch.int64)

        def angles() -> Angles:
            half = own.rope_dim // 2
            return zeros(1, half, dtype=torch.float32), zeros(1, half, dtype=torch.float32)

        def heads(size: int) -> Tensor:
            return zeros(own.num_heads, size, dtype=dtype)

        residual = zeros(own.hidden_size, dtype=torch.float32)
        stream = ResidualStream(residual, [angles() for _ in set(own.ropes)])
        query, attended = heads(own.head_dim), heads(own.value_dim)
        return cls(numbers(), numbers(), numbers() - 1, stream, query, attended)

    def first(self, num_rows: int) -> Buffers:
        """Return the first rows of them."""
        stream = self.stream
        return Buffers(
            self.token_ids[:num_rows],
            self.positions[:num_rows],
            self.slots[:num_rows],
            ResidualStream(
                stream.residual[:num_rows],
                [(cos[:num_rows], sin[:num_rows]) for cos, sin in stream.angles],
            ),
            self.query[:num_rows],
            self.attended[:num_rows],
        )

    def take(self, batch: Batch) -> None:
        """Copy a batch of as many rows, which is on the device."""
        self.token_ids.copy_(batch.token_ids)
        self.positions.copy_(batch.positions)
        self.slots.copy_(batch.attention.slot_mapping)


class Pieces:
    """The pieces of one model over one KV pool."""

    def __init__(self, forward: Forward, buffers: Buffers, sizes: tuple[int, ...]) -> None:
        """Prepare, without capturing anything yet.

        Args:
            forward: whose parts are captured.
            buffers: with as many rows as the largest size; `record` wants them as they were made.
            sizes: numbers of rows, ascending.
        """
        self._forward = forward
        self._buffers = buffers
        self._sizes = sizes
        # size |-> the first rows of the buffers, and as `_works`
        self._captured: dict[int, tuple[Buffers, Sequence[GraphRecording]]] = {}

    def record(self, recorder: Recorder, kv_pool: Tensor) -> None:
        """Capture them, the largest first: the others find the memory that these have taken."""
        began_s = time.perf_counter()
        num_bytes = 0
        for size in reversed(self._sizes):
            buffers = self._buffers.first(size)
            pieces = recorder.record_each(self._works(buffers, kv_pool))
            num_bytes += sum(piece.num_bytes for piece in pieces)
            self._captured[size] = buffers, pieces
        _log.info(
            "%d pieces of steps of up to %d tokens, as CUDA graphs, take %d MiB and took %.1f s",
            sum(len(pieces) for _, pieces in self._captured.values()),
            self._sizes[-1],
            num_bytes >> 20,
            time.perf_counter() - began_s,
        )

    def takes(self, batch: Batch) -> bool:
        """Whether they can compute this step."""
        return 0 < len(batch.token_ids) <= self._sizes[-1]

    def filled(self, batch: Batch) -> Batch:
        """Return a batch on the host with as many rows as the pieces that will compute it."""
        return _filled(batch, self._sizes[bisect_left(self._sizes, len(batch.token_ids))])

    def part(
        self,
        batch: Batch,
        kv_pool: Tensor,
        attention: AttentionBackend,
        progress: LayerProgress | None = None,
    ) -> Finals:
        """Launch a step, or a part of one. Returns the same as Forward.part.

        Args:
            batch: as `filled`, and then uploaded.
            kv_pool: as recorded with.
            attention: of a layer.
            progress: as Decoder.logits.
        """
        forward, on_host = self._forward, batch.attention.on_host
        assert on_host is not None, "it was uploaded"
        num_rows = int(on_host.query_start.numpy()[-1])
        buffers, (first, *layers) = self._captured[len(batch.token_ids)]
        buffers.take(batch)
        query, attended = buffers.query[:num_rows], buffers.attended[:num_rows]
        # With others, a rank knows only behind their next sum that they have written their heads.
        is_alone = forward.ranks.shard.num_ranks == 1
        taps = RowTaps.of(batch)
        first.replay()
        for layer, piece in enumerate(layers):
            if taps is not None:  # the piece before has added to the stream all that is before it
                taps.take(forward.first_layer + layer, buffers.stream.residual, batch.sampled_rows)
            attention.attend(query, forward.kv(layer, kv_pool), batch.attention, attended)
            if progress is not None and is_alone:
                progress.reached(layer + 1)
            piece.replay()
            if progress is not None and not is_alone:
                progress.reached(layer + 1)
        if not forward.ends.is_last:
            return Finals()
        return forward.finals(buffers.stream.residual, None, batch.sampled_rows, batch.states)

    def _works(self, buffers: Buffers, kv_pool: Tensor) -> list[Callable[[], None]]:
        """Return what is captured: what is before the first attention, and behind each one."""
        forward, stream = self._forward, buffers.stream
        last = forward.num_layers - 1

        def write(layer: int, delta: Tensor | None) -> None:
            forward.query(layer, stream, delta, buffers.slots, kv_pool, out=buffers.query)

        def begin() -> None:
            begun = forward.begin(buffers.token_ids, buffers.positions)
            stream.residual.copy_(begun.residual)
            for (cos, sin), angles in zip(stream.angles, begun.angles, strict=True):
                cos.copy_(angles[0])
                sin.copy_(angles[1])
            write(0, None)

        def go_on(layer: int) -> None:
            delta = forward.attention_out(layer, buffers.attended)
            delta = forward.mlp(layer, stream, delta)
            if layer < last:
                write(layer + 1, delta)
            else:
                stream.residual.add_(delta)
                if not forward.ends.is_last:
                    forward.ends.hand_on(stream.residual)

        return [begin, *(partial(go_on, layer) for layer in range(last + 1))]


def _filled(batch: Batch, num_rows: int) -> Batch:
    """Return a batch on the host with more rows, which belong to no request."""

    def filled(tensor: Tensor, value: int) -> Tensor:
        out = np.full(num_rows, value)
        out[: len(tensor)] = tensor.numpy()
        return torch.from_numpy(out)

    return replace(
        batch,
        token_ids=filled(batch.token_ids, 0),
        positions=filled(batch.positions, 0),
        attention=replace(batch.attention, slot_mapping=filled(batch.attention.slot_mapping, -1)),
    )
