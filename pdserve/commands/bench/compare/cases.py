"""What modes are compared on: workloads, and how their targets follow from an idle cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from pdserve.commands.bench.load.scenarios import MODEL_LEN, SCENARIOS, Scenario, ScenarioName
from pdserve.commands.bench.load.sessions import SESSIONS, ClientSessions
from pdserve.commands.bench.load.traces import TraceRow
from pdserve.commands.bench.load.workload import (
    SyntheticWorkload,
    TimedRequest,
    TraceWorkload,
    Workload,
    trace_factor,
)

# Contents of prompts, beside the turns of runs at a rate, which are smaller: no cluster is sent one
# twice that is measured, so who keeps answers gains nothing.
WARM_UP, TOGETHER = 1 << 20, 1 << 21

_TRACE_TTFT_SCALE = 5.0
_TRACE_TPOT_SCALE = 2.5
_TRACE_DECK = 10
_SESSION_ROWS = 20_000  # requests, after which they begin anew
_SESSION_TIMES = 10


@dataclass(frozen=True, slots=True)
class CompareCase:
    """A workload that fits the model."""

    name: str
    shows: str
    workload: Workload
    ttft_scale: float
    tpot_scale: float
    deck: int  # number of requests that form a fair sample
    length_factor: float  # factor on the lengths of the trace or scenario
    num_cut: int = 0  # requests that were cut to fit the model
    least_s: float = 0.0  # over which a run's requests must arrive, to be like a longer one
    scenario: Scenario | None = None  # None: a trace
    times: Callable[[float], CompareCase] | None = None  # with a factor on its lengths

    @property
    def share(self) -> float:
        """Share of the time that is available for several cases."""
        return self.scenario.share if self.scenario is not None else 1.0

    def whole_decks(self, count: int) -> int:
        """Return `count` or a few more: a number of requests with the exact mixture."""
        return -(-count // self.deck) * self.deck

    def sample(self, count: int) -> list[TimedRequest]:
        """Return about `count` requests, of each kind at least one."""
        requests = self.workload.first(self.whole_decks(count))
        firsts = {request.kind: request for request in reversed(requests)}
        others = [request for request in requests if request is not firsts[request.kind]]
        return [*firsts.values(), *others][: max(count, len(firsts))]

    def count_at(self, rate: float, least: int, duration_s: float = 0.0) -> int:
        """Return how many requests a run at this rate needs, at least so many and for so long."""
        return self.whole_decks(max(least, ceil(rate * max(duration_s, self.least_s))))


def made_up(name: ScenarioName, max_model_len: int, length_scale: float, seed: int) -> CompareCase:
    """Make a case from a named scenario; `length_scale` 0 leaves it as it is.

    Raises:
        ConfigError: its longest request does not fit the model.
    """
    if name in SESSIONS:
        return _in_turns(SESSIONS[name], max_model_len, length_scale or 1.0, seed)
    scale = length_scale or 1.0
    scenario = SCENARIOS[name]
    fitted = scenario.fitted(max_model_len, scale)
    return CompareCase(
        name=name,
        shows=scenario.shows,
        workload=SyntheticWorkload(fitted, seed),
        ttft_scale=scenario.ttft_scale,
        tpot_scale=scenario.tpot_scale,
        deck=scenario.deck,
        length_factor=fitted.most_tokens / scenario.most_tokens,
        times=lambda factor: made_up(name, max_model_len, factor * scale, seed),
        scenario=fitted,
    )


def _in_turns(
    sessions: ClientSessions, max_model_len: int, length_scale: float, seed: int
) -> CompareCase:
    rows = sessions.rows(_SESSION_ROWS, max_model_len, length_scale, seed)
    return CompareCase(
        name=sessions.name,
        shows=sessions.shows,
        workload=TraceWorkload(rows, 1.0, max_model_len, seed),
        ttft_scale=sessions.ttft_scale,
        tpot_scale=sessions.tpot_scale,
        deck=_TRACE_DECK,
        length_factor=length_scale * min(1.0, max_model_len / MODEL_LEN),
        times=lambda factor: _in_turns(sessions, max_model_len, factor * length_scale, seed),
        least_s=_least_s(rows),
    )


def replayed(
    name: str, rows: Sequence[TraceRow], max_model_len: int, length_scale: float, seed: int
) -> CompareCase:
    """Make a case from a trace; `length_scale` 0 makes 99 of 100 requests fit the model."""
    factor = length_scale or trace_factor(rows, max_model_len)
    workload = TraceWorkload(rows, factor, max_model_len, seed)
    return CompareCase(
        name=name,
        shows=f"{len(rows)} requests of a trace, lengths times {workload.factor:.3g}",
        workload=workload,
        ttft_scale=_TRACE_TTFT_SCALE,
        tpot_scale=_TRACE_TPOT_SCALE,
        deck=_TRACE_DECK,
        length_factor=workload.factor,
        times=lambda further: replayed(name, rows, max_model_len, further * factor, seed),
        num_cut=workload.num_cut,
        least_s=_least_s(rows),
    )


def _least_s(rows: Sequence[TraceRow]) -> float:
    """Return how long sessions must arrive until about as many end: a few times what they think."""
    num_sessions = sum(row.follows is None for row in rows)
    return _SESSION_TIMES * sum(row.think_s for row in rows) / num_sessions
