"""The neighbour: short calls at a steady rate, alone, beside a well-behaved tenant, and attacked.

Rounds with the well-behaved tenant are spread among the attacks, so the hour hits both alike. The
bound is on all attacks together: a single one has too few calls for a p99.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

import msgspec
import numpy as np

from pdserve.commands.bench.load.client import open_session
from pdserve.commands.bench.load.open_loop import OpenLoopClient
from pdserve.commands.bench.load.outcome import Outcome, Percentiles
from pdserve.commands.bench.load.workload import TimedRequest, poisson_times, random_ids
from pdserve.commands.bench.neighbours.attacker import AttackPlan

ALONE, FAIR, ALL = "alone", "a well-behaved tenant", "all attacks"
MOST_RATIO = 1.2
_FAIR_EVERY = 3  # attacks
_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 32
_DRAIN_S = 60.0
_END_S = 30.0  # for an attacker to end once it is told to
_WARM_UP = 4  # calls


class Beside(msgspec.Struct, frozen=True):
    """The neighbour's calls beside one other tenant."""

    other: str
    calls: int
    not_finished: int
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_p50_ms: float | None
    client_late_p99_ms: float | None
    ends: dict[str, int]  # what became of the other's calls
    errors: dict[str, int]  # of the neighbour


class NeighboursReport(msgspec.Struct):
    """The results of `pdserve bench neighbours`; grows while it is measured."""

    rows: list[Beside] = []

    def row(self, other: str) -> Beside | None:
        """The row with this name, if it was measured."""
        return next((row for row in self.rows if row.other == other), None)

    @property
    def complaints(self) -> list[str]:
        """What the neighbour could complain about; empty if nothing."""
        said = [
            f"beside {row.other}: {row.not_finished} of {row.calls} calls did not finish"
            for row in self.rows
            if row.not_finished
        ]
        alone, fair, attacked = (self.row(name) for name in (ALONE, FAIR, ALL))
        if alone is None or fair is None or attacked is None:
            return [*said, "not all was measured"]
        step_ms = fair.itl_p50_ms or 0.0
        for name, of in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
            p99s = [getattr(row, of).p99 or 0.0 for row in (alone, fair, attacked)]
            most_ms = max(MOST_RATIO * p99s[1], p99s[0] + step_ms)
            if p99s[2] > most_ms:
                said.append(f"{name} p99 is {p99s[2]:.1f} ms; at most {most_ms:.1f} ms are fair")
        return said


@dataclass(frozen=True, slots=True)
class SharedCluster:
    """The cluster, and the two tenants' keys."""

    url: str
    model: str
    max_model_len: int
    neighbour_key: str
    attacker_key: str
    settle: Callable[[], Awaitable[None]]  # returns when nothing is in flight any more


@dataclass(slots=True)
class _Rounds:
    """The neighbour's calls beside one other, over all rounds."""

    outcomes: list[Outcome] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)


async def measure_neighbours(
    target: SharedCluster,
    attacks: Sequence[str],
    rate: float,
    round_s: float,
    report: NeighboursReport,
    say: Callable[[str], None],
) -> None:
    """Measure all of them, for `round_s` each, and add a row each to the report.

    Args:
        target: the cluster.
        attacks: names in ATTACKS.
        rate: the neighbour's calls per second.
        round_s: time for each attack.
        report: filled in as soon as something is known.
        say: told what is being done.
    """
    numbers = count(1)
    rounds: dict[str, _Rounds] = {ALONE: _Rounds(), FAIR: _Rounds(), ALL: _Rounds()}
    order = [ALONE]
    for index, name in enumerate(attacks):
        order += [FAIR] * (index % _FAIR_EVERY == 0) + [name]
    headers = {"Authorization": f"Bearer {target.neighbour_key}"}
    async with open_session(headers) as session:
        client = OpenLoopClient(session, target.url, target.model)
        await client.one_by_one(_requests(rate, _WARM_UP / rate, 0), "warm-up", _DRAIN_S)
        for other in order:
            say(f"beside {other}, for {round_s:g} s" if other != ALONE else "alone")
            number = next(numbers)
            requests = _requests(rate, round_s, number)
            ends: dict[str, int] = {}
            async with _beside(other, target, number, ends, say):
                run = await client.run(requests, f"neighbour-{number}", _DRAIN_S)
            await target.settle()
            for kept in {other, *({ALL} if other in attacks else ())}:
                known = rounds.setdefault(kept, _Rounds())
                known.outcomes += run.outcomes
                known.lags_s += run.lags_s
                known.ends = {e: known.ends.get(e, 0) + ends.get(e, 0) for e in known.ends | ends}
    report.rows += [_row(other, known) for other, known in rounds.items() if known.outcomes]


def _requests(rate: float, seconds: float, number: int) -> list[TimedRequest]:
    times = poisson_times(rate, max(1, round(rate * seconds)), [number])
    return [
        TimedRequest(at_s, "neighbour", random_ids(_PROMPT_TOKENS, [number, i]), _OUTPUT_TOKENS)
        for i, at_s in enumerate(times)
    ]


@asynccontextmanager
async def _beside(
    other: str,
    target: SharedCluster,
    number: int,
    ends: dict[str, int],
    say: Callable[[str], None],
) -> AsyncIterator[None]:
    """Somebody is there meanwhile; `ends` becomes what became of its calls."""
    if other == ALONE:
        yield
        return
    plan = AttackPlan(
        attack="" if other == FAIR else other,
        url=target.url,
        model=target.model,
        max_model_len=target.max_model_len,
        key=target.attacker_key,
        first_number=number << 32,
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.commands.bench.neighbours.attacker"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(plan) + b"\n")
        await process.stdin.drain()
        await process.stdout.readline()  # it is about to begin
        yield
        process.stdin.close()
        try:
            told = await asyncio.wait_for(process.stdout.read(), _END_S)
        except TimeoutError:  # it has the lowest priority, and what the neighbour felt is known
            say(f"{other} is ended; it has not told in {_END_S:g} s what became of its calls")
        else:
            ends |= msgspec.json.decode(told or b"{}", type=dict[str, int])
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _row(other: str, rounds: _Rounds) -> Beside:
    outcomes = rounds.outcomes
    gaps_s = [gap for outcome in outcomes for gap in outcome.gaps_s]
    failed = [outcome for outcome in outcomes if outcome.end != "finished"]
    errors = [outcome.error or outcome.end for outcome in failed]
    return Beside(
        other=other,
        calls=len(outcomes),
        not_finished=len(failed),
        ttft_ms=Percentiles.of([outcome.ttft_s for outcome in outcomes]),
        tpot_ms=Percentiles.of([outcome.tpot_s for outcome in outcomes]),
        itl_p50_ms=float(np.median(gaps_s)) * 1e3 if gaps_s else None,
        client_late_p99_ms=Percentiles.of(rounds.lags_s).p99,
        ends=rounds.ends,
        errors={error: errors.count(error) for error in errors},
    )
