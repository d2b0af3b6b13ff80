"""What steps and pulls cost: told to coordinators, kept for whoever calibrates, and doubted.

Coordinators are told once it is measured, and after large changes. Every load report has the
current ratio of actual to reported step costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import count, takewhile
from typing import Final

import msgspec

from kv_transfer.host import host_id
from pdserve.engine.interface import StepReport
from pdserve.measured.perf_model import PerfModel, StepShape
from pdserve.measured.samples import DraftTally, NodeKind, NodeSamples, PullSample, StepSample
from pdserve.node.prefixes.cost import PullCosts
from pdserve.protocol import PerfReport, StepCosts, TransferCosts
from pdserve.settings.config import EngineConfig
from pdserve.wire.outbox import Sender

MUCH = 1.25  # factor from which on a cost counts as changed
TYPICAL_BYTES = (1 << 16, 1 << 20, 1 << 26)  # a block, a short prompt, a long one


class PerfFeed:
    """Sends a node's costs to its coordinators. Belongs to the event loop."""

    def __init__(self, links: Sequence[Sender], costs: PullCosts, engine: EngineConfig) -> None:
        self._links = links
        self._costs = costs
        self._engine = engine
        self._told: PerfReport | None = None  # None: step costs are not known yet
        costs.on_pull(self._pull_learned)

    def attached(self, link: Sender) -> None:
        """Send the costs, if known, to a coordinator that has just attached."""
        if self._told is not None:
            link.send(self._told)

    def tell(self) -> None:
        """Send the current costs to all coordinators; step costs are known from now on."""
        self._told = PerfReport(
            step=self._costs.perf.costs,
            token_budget=self._engine.token_budget,
            max_batch_size=self._engine.max_batch_size,
            transfers=self._costs.transfers(),
        )
        for link in self._links:
            link.send(self._told)

    def _pull_learned(self, *_: object) -> None:
        told = self._told
        if told is not None and _differ_much(told.transfers, self._costs.transfers()):
            self.tell()


def _differ_much(told: Sequence[TransferCosts], known: Sequence[TransferCosts]) -> bool:
    before = {costs.transport: costs for costs in told}
    return any(
        costs.transport not in before
        or any(
            not 1 / MUCH <= _pull_s(costs, size) / _pull_s(before[costs.transport], size) <= MUCH
            for size in TYPICAL_BYTES
        )
        for costs in known
    )


def _pull_s(costs: TransferCosts, num_bytes: int) -> float:
    return costs.fixed_s + num_bytes / costs.bytes_per_s


FASTER = 0.75  # ratio of real to profiled time from which on the profile is wrong
CONVINCING_STEPS = 200  # in a row


class ProfileWatch:
    """Notices that a profile was taken in a bad moment: steps in service keep being faster than it.

    It compares the running correction of a node's costs with what a good profile would need. Slower
    steps say nothing about a profile. They include what it leaves out, the event loop and waits for
    the cores, and neighbours come and go.
    """

    def __init__(self, perf: PerfModel, doubt: Callable[[float], object]) -> None:
        """Watch `perf`; call `doubt` at most once, with the profile's relative error."""
        self._perf = perf
        self._doubt = doubt
        self._num_faster = 0
        self._is_doubted = False

    def stepped(self) -> None:
        """Look, after a step has been observed."""
        ratio = min(self._perf.prefill_ratio, self._perf.decode_ratio)
        self._num_faster = self._num_faster + 1 if ratio < FASTER else 0
        if self._num_faster >= CONVINCING_STEPS and not self._is_doubted:
            self._is_doubted = True
            self._doubt(1 / ratio - 1)


MOST_STEPS: Final = 1 << 15  # kept; a step of 1 ms is kept for half a minute
MOST_PULLS: Final = 1 << 12
MOST_TOLD: Final = 2048  # steps in one answer, whose encoding holds up the event loop


class SampleLog:
    """A bounded ring of what the newest steps and pulls took: GET /samples.

    It costs each step one append.
    """

    def __init__(
        self,
        node_id: str,
        kind: Callable[[], NodeKind],
        believed: Callable[[], StepCosts],
        drafts: Callable[[], DraftTally] = DraftTally,
        most_steps: int = MOST_STEPS,
    ) -> None:
        """`kind` is asked once, at the first look, since most nodes are never looked at."""
        self._node_id = node_id
        self._make_kind = kind
        self._believed = believed
        self._drafts = drafts
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
                drafts=self._drafts(),
            )
        )

    @cached_property
    def _kind(self) -> NodeKind:
        return self._make_kind()

    @cached_property
    def _host_id(self) -> str:
        return host_id()
