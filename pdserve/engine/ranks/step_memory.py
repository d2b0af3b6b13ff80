"""The memory in which ranks meet, and through which a step reaches them: a memfd without a name.

    | RankGroup (csrc/ranks) | the step: sizes, then its arrays | logits [num_sampled, vocab_size] |

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
from pdserve.engine.ranks.sizes import LOGITS_BYTES, STEP_BYTES, memory_bytes
from pdserve.engine.steps.batch import Batch, WantedStates

_ALIGNMENT = 64
_HEAD = 8  # int64: num_tokens, num_requests, num_blocks, num_sampled, num_states
_NOTHING = torch.empty(0, dtype=torch.int64)

_Shapes = Iterator[tuple[torch.dtype, tuple[int, ...]]]


class StepMemory:
    """One rank's view of it."""

    def __init__(self, memory: NDArray[np.uint8], rank: int, num_ranks: int) -> None:
        """Use memory of `sizes.memory_bytes(num_ranks)` bytes, which was zeroed once."""
        assert len(memory) == memory_bytes(num_ranks), "ranks agree on the memory"
        self.group = _native.RankGroup(memory, rank, num_ranks)
        data, start = torch.from_numpy(memory), _native.RankGroup.memory_bytes(num_ranks)
        self._step = data[start : start + STEP_BYTES]
        self._head = self._step[: 8 * _HEAD].view(torch.int64)
        self._logits = data[start + STEP_BYTES :].view(torch.float32)

    def logits(self, num_sampled: int, vocab_size: int) -> Tensor:
        """[num_sampled, vocab_size] float32, of which each rank writes its columns.

        Raises:
            ValueError: there is not that much room.
        """
        num_floats = num_sampled * vocab_size
        if num_floats > len(self._logits):
            raise ValueError(
                f"logits of {num_sampled} rows: a tensor-parallel step has at most "
                f"{len(self._logits) // vocab_size}; lower max_batch_size"
            )
        return self._logits[:num_floats].view(num_sampled, vocab_size)

    def write(self, batch: Batch) -> None:
        """Write the next step. Rank 0 only, while none is running.

        Raises:
            ValueError: there is not that much room.
        """
        attention = batch.attention
        states = _NOTHING if batch.states is None else batch.states.rows
        num_requests, num_blocks = attention.block_tables.shape
        sizes = (len(batch.token_ids), num_requests, num_blocks, len(batch.sampled_rows))
        self._head[:5] = torch.tensor([*sizes, len(states)])
        arrays = (
            batch.token_ids,
            attention.query_start,
            attention.context_lens,
            attention.block_tables,
            batch.sampled_rows,
            states,
        )
        for place, array in zip(self._arrays(), arrays, strict=True):
            place.copy_(array)

    def read(self, hidden_size: int) -> Batch:
        """The step that is running, without what only rank 0 or other decoders need."""
        token_ids, query_start, context_lens, tables, sampled, states = self._arrays()
        wanted = WantedStates(states, torch.empty(len(states), hidden_size))
        return Batch(
            token_ids=token_ids,
            positions=_NOTHING,
            attention=AttentionBatch(query_start, context_lens, tables, _NOTHING),
            sampled_rows=sampled,
            sampled_requests=[],
            states=wanted if len(states) else None,
        )

    def _arrays(self) -> list[Tensor]:
        """Views of the step's arrays, by the sizes at its head."""
        arrays, start = [], 8 * _HEAD
        for dtype, shape in self._shapes():
            end = start + int(np.prod(shape)) * dtype.itemsize
            if end > STEP_BYTES:
                raise ValueError(
                    f"a tensor-parallel step has at most {STEP_BYTES} bytes of tokens and block "
                    "tables: lower max_batch_size or max_model_len"
                )
            arrays.append(self._step[start:end].view(dtype).view(shape))
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
        return arrays

    def _shapes(self) -> _Shapes:
        num_tokens, num_requests, num_blocks, num_sampled, num_states = self._head[:5].tolist()
        yield torch.int64, (num_tokens,)
        yield torch.int32, (num_requests + 1,)
        yield torch.int32, (num_requests,)
        yield torch.int32, (num_requests, num_blocks)
        yield torch.int64, (num_sampled,)
        yield torch.int64, (num_states,)


assert LOGITS_BYTES % _ALIGNMENT == 0
