"""Whether attention works on this GPU: a library that imports may still fail to compile.

It computes small batches, each of them also with a window if the model has one, and prompts also
to where it is told (`out`), as pieces have it. All is compared with plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import torch
from torch import Tensor

from pdserve.engine.attention.interface import Attend, AttentionBackend, AttentionBatch, LayerKv
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda.attention.catalog import AttentionNeeds, DecodeAttention
from pdserve.engine.cuda.capture.graphs import Recorder

_BLOCK_SIZE: Final = 16
Contexts: TypeAlias = tuple[tuple[int, int], ...]  # (rows, KV tokens) of each request
_MIXED: Final = ((3, 21), (1, 33))  # a chunk and a decode row
_DECODES: Final = ((1, 21), (1, 33), (1, 0))  # the last one fills up: nobody reads its result
_WINDOW: Final = 16  # whatever the model's is: so few tokens that one more or less shows
# Of values up to about 3.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class AttentionBroken(RuntimeError):
    """A backend computes something else than attention."""


def check_attention(backend: AttentionBackend, needs: AttentionNeeds, device: torch.device) -> None:
    """Compute a small batch of both kinds of rows.

    Raises:
        AttentionBroken: the result is wrong. Anything else that the backend raises.
    """
    trial = AttentionTrial(_MIXED, needs, device, num_layers=2)
    for window in _windows(needs):
        found = trial.attend(backend.attend, 1, window)
        expected = trial.attend(ReferenceAttention().attend, 1, window)
        _compare(backend.name, found, expected, window)
        placed = trial.attend_to_place(backend, 1, window)
        _compare(f"{backend.name}, told where its result goes,", placed, expected, window)


def check_decodes(
    attention: DecodeAttention, needs: AttentionNeeds, device: torch.device, recorder: Recorder
) -> None:
    """Compute a small batch of decodes by graphs.

    Raises:
        AttentionBroken: the result is wrong. Anything else that the attention raises, or the
            capture of it.
    """
    trial = AttentionTrial(_DECODES, needs, device, num_layers=2)
    results: list[Tensor] = []

    def work() -> None:
        results.append(trial.attend(attention.attend_decode, 1, window))

    for window in _windows(needs):
        graph = recorder.record(work)
        graph.replay()
        expected = trial.attend(ReferenceAttention().attend, 1, window)
        _compare(f"{attention.name} in a graph", results[-1][:-1], expected[:-1], window)


def token_bytes(needs: AttentionNeeds) -> int:
    """Return the bytes of a token's KV in one layer of a trial's pool."""
    return math.prod(_pool_shape(needs, 1, 1)) * needs.dtype.itemsize // _BLOCK_SIZE


def _pool_shape(needs: AttentionNeeds, num_blocks: int, num_layers: int) -> tuple[int, ...]:
    num_planes = 2 if needs.value_dim is None else 1
    return (num_blocks, num_layers, num_planes, needs.num_kv_heads, _BLOCK_SIZE, needs.head_dim)


def _windows(needs: AttentionNeeds) -> list[int | None]:
    has_window = any(window is not None for window in needs.windows)
    return [None, _WINDOW] if has_window else [None]


def _compare(name: str, found: Tensor, expected: Tensor, window: int | None) -> None:
    error = float((expected.float() - found.float()).abs().max())
    if not error <= _TOLERANCE[expected.dtype]:
        where = "" if window is None else f" with a window of {window} tokens"
        raise AttentionBroken(f"{name} is off by {error:.2g}{where}")


class AttentionTrial:
    """A batch of random numbers on a device, and a pool for it."""

    def __init__(
        self, contexts: Contexts, needs: AttentionNeeds, device: torch.device, num_layers: int
    ) -> None:
        """Make one with the model's heads, and these requests. `num_layers`: of the pool."""
        random = torch.Generator(device).manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device=device, dtype=needs.dtype)

        on_host = _batch(contexts)
        num_blocks = int(on_host.block_tables.max()) + 1
        self._batch = _moved(on_host, device)
        self._num_layers = num_layers
        self._pool = drawn(*_pool_shape(needs, num_blocks, num_layers))
        num_rows = sum(rows for rows, _ in contexts)
        self._query = drawn(num_rows, needs.num_heads, needs.head_dim)
        self._needs = needs
        self._sinks = drawn(needs.num_heads).float() if needs.has_sinks else None

    def attend(self, attend: Attend, layer: int, sliding_window: int | None) -> Tensor:
        """Return what a function like AttentionBackend.attend computes of a layer."""
        return self._attend(attend, layer, self._batch, sliding_window)

    def attend_to_place(
        self, backend: AttentionBackend, layer: int, sliding_window: int | None
    ) -> Tensor:
        """Return what a backend has put where it was told to; NaN where it has put nothing."""
        needs = self._needs
        shape = len(self._query), needs.num_heads, needs.value_dim or needs.head_dim
        out = torch.full(shape, torch.nan, dtype=needs.dtype, device=self._query.device)
        backend.attend(self._query, self._kv(layer, sliding_window), self._batch, out)
        return out

    def step(self, attend: Attend, windows: Sequence[int | None]) -> None:
        """Do it for a model whose layers have these windows; the pool's layers take turns.

        As in any step the batch is another object, for which some plan, once for all layers.
        """
        batch = replace(self._batch)
        for index, window in enumerate(windows):
            self._attend(attend, index % self._num_layers, batch, window)

    def _attend(
        self,
        attend: Attend,
        layer: int,
        batch: AttentionBatch,
        sliding_window: int | None,
    ) -> Tensor:
        return attend(self._query, self._kv(layer, sliding_window), batch)

    def _kv(self, layer: int, sliding_window: int | None) -> LayerKv:
        needs, scale = self._needs, self._needs.head_dim**-0.5
        of_heads = needs.cap, self._sinks, needs.value_dim
        return LayerKv(self._pool, layer, scale, sliding_window, *of_heads)


def _batch(contexts: Contexts) -> AttentionBatch:
    starts, tables, slots = [0], [], []
    num_blocks = 0
    for rows, context in contexts:
        starts.append(starts[-1] + rows)
        blocks = list(range(num_blocks, num_blocks + -(-context // _BLOCK_SIZE)))
        num_blocks += len(blocks)
        slots += [
            blocks[p // _BLOCK_SIZE] * _BLOCK_SIZE + p % _BLOCK_SIZE if p >= 0 else -1
            for p in range(context - rows, context)
        ]
        tables.append(blocks)
    width = max(map(len, tables))

    def ints(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    return AttentionBatch(
        query_start=ints(starts),
        context_lens=ints([context for _, context in contexts]),
        block_tables=ints([table + [0] * (width - len(table)) for table in tables]),
        slot_mapping=ints(slots, torch.int64),
    )


def _moved(batch: AttentionBatch, device: torch.device) -> AttentionBatch:
    return AttentionBatch(
        query_start=batch.query_start.to(device),
        context_lens=batch.context_lens.to(device),
        block_tables=batch.block_tables.to(device),
        slot_mapping=batch.slot_mapping.to(device),
        on_host=batch,
    )
