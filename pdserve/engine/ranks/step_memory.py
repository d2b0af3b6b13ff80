"""The memory in which ranks meet, and through which a step reaches them: a memfd without a name.

    | RankGroup (csrc/ranks) | the step: sizes, then its arrays | logits, final states, taps |

There is one step in it, not a queue of them: rank 0 writes the next one when all have left the
last. Only pages that are written to take memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve import _native
from pdserve.engine.attention import AttentionBatch
from pdserve.engine.ranks.sizes import RESULT_BYTES, STEP_BYTES, memory_bytes
from pdserve.engine.steps.batch import Batch, StateTables, Taps, WantedStates

_ALIGNMENT = 64
_HEAD = 8  # int64: num_tokens, num_requests, num_blocks, num_sampled, num_states, and these
_NUM_BYTES = 5  # of all of it
_FLAGS = 6
_NUM_TAPS = 7  # hosts of earlier builds know steps without any
# Flags; but for the first, not for other hosts. Behind them, how many blocks a state has.
_REPORTS_LAYERS, _IS_ADAPTED = 1, 2
_FLAG_BITS = 8
_DIGEST_BYTES = 16
_NOTHING = torch.empty(0, dtype=torch.int64)
_NO_STATES = StateTables(torch.empty(0, 3, 0, dtype=torch.int32), _NOTHING.int())

_Shapes = Iterator[tuple[torch.dtype, tuple[int, ...]]]


class StepMemory:
    """One rank's view of it."""

    def __init__(self, memory: NDArray[np.uint8], rank: int, stages: tuple[int, ...]) -> None:
        """Use memory of `memory_bytes(stages)` bytes, which was zeroed once."""
        assert len(memory) == memory_bytes(stages), "ranks agree on the memory"
        self.group = _native.RankGroup(memory, rank, stages)
        data, start = torch.from_numpy(memory), _native.RankGroup.memory_bytes(stages)
        self._step = data[start : start + STEP_BYTES]
        self._head = self._step[: 8 * _HEAD].view(torch.int64)
        self._results = data[start + STEP_BYTES :].view(torch.float32)

    def logits(self, num_sampled: int, vocab_size: int) -> Tensor:
        """[num_sampled, vocab_size] float32, of which each rank writes its columns.

        Raises:
            ValueError: there is not that much room.
        """
        return self._rows(0, num_sampled, vocab_size)

    def states(self, hidden_size: int, vocab_size: int) -> Tensor:
        """[num_states, hidden_size] float32 of the step that is running.

        The first rank of the last stage writes them.

        Raises:
            ValueError: there is not that much room.
        """
        num_sampled, num_states = self._head[3:5].tolist()
        return self._rows(num_sampled * vocab_size, num_states, hidden_size)

    def taps(self, hidden_size: int, vocab_size: int) -> Tensor:
        """[num_sampled, num_taps, hidden_size] float32 of the step that is running.

        The first rank of each stage writes those of its layers.

        Raises:
            ValueError: there is not that much room.
        """
        num_sampled, num_states, *_, num_taps = self._head[3:].tolist()
        first = num_sampled * vocab_size + num_states * hidden_size
        rows = self._rows(first, num_sampled * num_taps, hidden_size)
        return rows.view(num_sampled, num_taps, hidden_size)

    def _rows(self, first: int, num_rows: int, width: int) -> Tensor:
        if first + num_rows * width > len(self._results):
            raise ValueError(
                f"{num_rows} rows of {width} results: a step of several ranks has at most "
                f"{(len(self._results) - first) // width}; lower max_batch_size"
            )
        return self._results[first : first + num_rows * width].view(num_rows, width)

    @property
    def step(self) -> Tensor:
        """The step that is running as another host needs it: uint8[num_bytes]."""
        return self._step[: int(self._head[_NUM_BYTES])]

    def step_to_be(self, num_bytes: int) -> Tensor:
        """Memory for a step that another host has written: uint8[num_bytes].

        Raises:
            ValueError: there is not that much room.
        """
        if not 8 * _HEAD <= num_bytes <= STEP_BYTES:
            raise ValueError(f"a step of {num_bytes} bytes")
        return self._step[:num_bytes]

    @property
    def reports_layers(self) -> bool:
        """Whether somebody waits for single layers of the step that is running."""
        return bool(int(self._head[_FLAGS]) & _REPORTS_LAYERS)

    def write(self, batch: Batch, *, reports_layers: bool = False) -> None:
        """Write the next step. Rank 0 only, while none is running.

        Raises:
            ValueError: there is not that much room.
        """
        attention = batch.attention
        states = _NOTHING if batch.states is None else batch.states.rows
        taps = _NOTHING if batch.taps is None else batch.taps.layers
        tables = _NO_STATES if batch.state_tables is None else batch.state_tables
        num_requests, num_blocks = attention.block_tables.shape
        sizes = (len(batch.token_ids), num_requests, num_blocks, len(batch.sampled_rows))
        self._head[:5] = torch.tensor([*sizes, len(states)])
        self._head[_NUM_TAPS] = len(taps)
        arrays = (
            batch.token_ids,
            attention.query_start,
            attention.context_lens,
            attention.block_tables,
            batch.sampled_rows,
            states,
            batch.positions,
            taps,
            torch.tensor(batch.adapted_from, dtype=torch.int64),
            _digits(batch.adapters),
            tables.blocks,
            tables.kept_after,
        )
        is_adapted = _IS_ADAPTED * bool(batch.adapters)
        state_blocks = tables.blocks.shape[2]
        flags = _REPORTS_LAYERS * reports_layers + is_adapted
        self._head[_FLAGS] = flags + (state_blocks << _FLAG_BITS)
        places, end = self._arrays()
        for place, array in zip(places, arrays, strict=True):
            place.copy_(array)
        self._head[_NUM_BYTES] = end

    def read(self, hidden_size: int, vocab_size: int) -> Batch:
        """The step that is running, without what only rank 0 or other decoders need."""
        arrays, end = self._arrays()
        if end != self._head[_NUM_BYTES]:
            raise ValueError(f"a step of {self._head[_NUM_BYTES]} bytes, which needs {end}")
        *others, adapted_from, digits, blocks, kept_after = arrays
        token_ids, query_start, context_lens, tables, sampled, states, positions, taps = others
        wanted = WantedStates(states, self.states(hidden_size, vocab_size))
        tapped = Taps(taps, self.taps(hidden_size, vocab_size))
        return Batch(
            token_ids=token_ids,
            positions=positions,
            attention=AttentionBatch(query_start, context_lens, tables, _NOTHING),
            sampled_rows=sampled,
            sampled_requests=[],
            adapters=_digests(digits),
            adapted_from=tuple(adapted_from.tolist()),
            states=wanted if len(states) else None,
            state_tables=StateTables(blocks, kept_after) if len(blocks) else None,
            taps=tapped if len(taps) else None,
        )

    def _arrays(self) -> tuple[list[Tensor], int]:
        """Views of the step's arrays, by the sizes at its head, and where the last one ends."""
        arrays, start = [], 8 * _HEAD
        for dtype, shape in self._shapes():
            end = start + int(np.prod(shape)) * dtype.itemsize
            if end > STEP_BYTES:
                raise ValueError(
                    f"a step of several ranks has at most {STEP_BYTES} bytes of tokens and block "
                    "tables: lower max_batch_size or max_model_len"
                )
            arrays.append(self._step[start:end].view(dtype).view(shape))
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
        return arrays, start

    def _shapes(self) -> _Shapes:
        num_tokens, num_requests, num_blocks, num_sampled, num_states = self._head[:5].tolist()
        yield torch.int64, (num_tokens,)
        yield torch.int32, (num_requests + 1,)
        yield torch.int32, (num_requests,)
        yield torch.int32, (num_requests, num_blocks)
        yield torch.int64, (num_sampled,)
        yield torch.int64, (num_states,)
        yield torch.int64, (num_tokens,)
        yield torch.int64, (int(self._head[_NUM_TAPS]),)
        num_adapted = num_requests if int(self._head[_FLAGS]) & _IS_ADAPTED else 0
        yield torch.int64, (num_adapted,)
        yield torch.uint8, (num_adapted, _DIGEST_BYTES)
        state_blocks = int(self._head[_FLAGS]) >> _FLAG_BITS
        num_with_states = num_requests if state_blocks else 0
        yield torch.int32, (num_with_states, 3, state_blocks)
        yield torch.int32, (num_with_states,)


def _digits(digests: tuple[str, ...]) -> Tensor:
    """[num_requests, 16] uint8, zeros for none."""
    rows = [list(bytes.fromhex(digest or "00" * _DIGEST_BYTES)) for digest in digests]
    return torch.tensor(rows, dtype=torch.uint8).view(-1, _DIGEST_BYTES)


def _digests(digits: Tensor) -> tuple[str, ...]:
    return tuple("" if not any(row) else bytes(row).hex() for row in digits.tolist())


assert RESULT_BYTES % _ALIGNMENT == 0
