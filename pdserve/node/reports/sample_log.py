"""Remembers what the newest steps and pulls took, for whoever calibrates: GET /samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property
from itertools import count, takewhile
from typing import Final

import msgspec

from kv_transfer.host import host_id
from pdserve.engine.interface import StepReport
from pdserve.measured.perf_model import StepShape
from pdserve.measured.samples import NodeKind, NodeSamples, PullSample, StepSample
from pdserve.protocol import StepCosts

MOST_STEPS: Final = 1 << 15  # kept; a step of 1 ms is kept for half a minute
MOST_PULLS: Final = 1 << 12
MOST_TOLD: Final = 2048  # steps in one answer, whose encoding holds up the event loop


class SampleLog:
    """A bounded ring of measurements. It costs each step one append."""

    def __init__(
        self,
        node_id: str,
        kind: Callable[[], NodeKind],
        believed: Callable[[], StepCosts],
        most_steps: int = MOST_STEPS,
    ) -> None:
        """`kind` is asked once, at the first look, since most nodes are never looked at."""
        self._node_id = node_id
        self._make_kind = kind
        self._believed = believed
        self._numbers = count(1)
        self._newest = 0
        self._steps: deque[tuple[int, float, float, StepShape]] = deque(maxlen=most_steps)
        self._pulls: deque[PullSample] = deque(maxlen=MOST_PULLS)

    def stepped(self, report: StepReport) -> None:
        """Note a step."""
        self._newest = next(self._numbers)
        ended_s = report.started_s + report.model_s
        self._steps.append((self._newest, ended_s, report.period_s, report.shape))

    def pulled(self, transport: str, num_bytes: int, seconds: float) -> None:
        """Note a complete pull."""
        self._newest = next(self._numbers)
        self._pulls.append(PullSample(self._newest, transport, num_bytes, seconds))

    def since(self, number: int) -> bytes:
        """Return the JSON of a `NodeSamples`: what came after that number, the oldest first.

        If that is too much for one answer, `newest` is the number to go on from.
        """
        steps = list(takewhile(lambda step: step[0] > number, reversed(self._steps)))[::-1]
        newest = self._newest
        if len(steps) > MOST_TOLD:
            steps = steps[:MOST_TOLD]
            newest = steps[-1][0]
        pulls = list(takewhile(lambda pull: pull.number > number, reversed(self._pulls)))[::-1]
        return msgspec.json.encode(
            NodeSamples(
                node_id=self._node_id,
                host_id=self._host_id,
                kind=self._kind,
                believed=self._believed(),
                newest=newest,
                steps=[
                    StepSample(
                        at,
                        ended_s,
                        period_s,
                        shape.num_tokens,
                        shape.num_sampled,
                        shape.prefill_pairs,
                        shape.decode_context,
                    )
                    for at, ended_s, period_s, shape in steps
                ],
                pulls=[pull for pull in pulls if pull.number <= newest],
            )
        )

    @cached_property
    def _kind(self) -> NodeKind:
        return self._make_kind()

    @cached_property
    def _host_id(self) -> str:
        return host_id()
