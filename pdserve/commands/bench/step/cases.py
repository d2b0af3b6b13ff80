"""The steps of `pdserve bench step`, and which of them fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from pdserve.kv import KvLayout
from pdserve.measured.perf_model import StepRow

Phase = Literal["decode", "prefill"]


class SkippedCase(msgspec.Struct, frozen=True):
    """A case that was not measured."""

    phase: Phase
    batch: int
    context: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepCase:
    """One step: one token for each of `batch` requests, or one prompt. All rows are sampled."""

    phase: Phase
    batch: int
    context: int  # tokens of a request after the step

    @property
    def rows(self) -> tuple[StepRow, ...]:
        """Rows of the step."""
        if self.phase == "prefill":
            return (StepRow(self.context, 0),)
        return (StepRow(1, self.context - 1, is_decoding=True),) * self.batch

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(row.num_tokens for row in self.rows)

    def num_blocks(self, layout: KvLayout) -> int:
        """Return the number of blocks of its requests, which share none."""
        return self.batch * (layout.blocks_for(self.context) + layout.state_blocks)


@dataclass(frozen=True, slots=True)
class Grid:
    """The cases that the user asked for."""

    batches: Sequence[int]
    contexts: Sequence[int]  # context lengths of decodes
    prompts: Sequence[int]  # tokens of a prompt

    def cases(self) -> Iterator[StepCase]:
        """Yield decodes, then prompts."""
        for batch in self.batches:
            for context in self.contexts:
                yield StepCase("decode", batch, context)
        for tokens in self.prompts:
            yield StepCase("prefill", 1, tokens)


def with_room(
    cases: Iterator[StepCase], layout: KvLayout, max_model_len: int, memory_bytes: int
) -> tuple[list[StepCase], list[SkippedCase]]:
    """Return the cases that fit, and why the others do not.

    Requests of a batch never share blocks to make them fit: the caches would then serve what comes
    from memory in production.
    """
    kept: list[StepCase] = []
    skipped: list[SkippedCase] = []
    for case in cases:
        needed_bytes = case.num_blocks(layout) * layout.block_bytes
        if case.context > max_model_len:
            reason = f"the model takes {max_model_len} tokens"
        elif needed_bytes > memory_bytes:
            reason = f"needs {_gib(needed_bytes)} of KV; --kv-memory is {_gib(memory_bytes)}"
        else:
            kept.append(case)
            continue
        skipped.append(SkippedCase(case.phase, case.batch, case.context, reason))
    return kept, skipped


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
