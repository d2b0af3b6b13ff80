"""Another build is rolled out process by process under load: nobody is told, and no token changes.

`make test-upgrade` builds the earlier commit first (`tools/earlier_build.py`).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import psutil
import pytest
from msgspec.structs import replace

from pdserve.commands.cluster.child import Child
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.plan import COORDINATOR
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client, Output, Stream
from tests.cluster.fleet import Fleet, fleet_config, read_gauges, running
from tests.cluster.forked import ForkedChild
from tools.earlier_build import EARLIER, python_of

KERNELS = "avx2"
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
LENGTHS = (5, 40, 400)  # of answers; the last are under way while a process is replaced
STARTED_S = 300.0  # four processes, each of which imports torch
PATIENT_S = 600.0  # an answer takes as long as a busy machine lets it
AGAIN_S = 0.1  # a client that was told to come again, or was not heard, waits so long
LOSSES = (
    "pulls_failed",
    "pulls_timed_out",
    "pulls_corrupt",
    "exports_refused",
    "transport_garbage",
    "recomputed_tokens",
)
MOST_OTHERS = 10.0  # percent of the cores; beyond, a rollout is not what is felt
MOST_LONGER = 1.5  # the longest of a hundred gaps
TPOT_GAPS = 30  # of an answer; the mean of fewer is one step's
# Answers of a rollout that take longer than all others: were all alike, and as many in a rollout as
# not, each further one would be half as likely as the one before.
MOST_BY_CHANCE = 6
Span = tuple[float, float]
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not python_of().exists(), reason=f"`make test-upgrade` builds {EARLIER}"),
]


async def arithmetic_of(python: Path) -> str:
    """What a build's kernels compute: nodes of which it differs do not share KV."""
    code = (
        "from pdserve.engine.native.choice import digest_of as of;"
        "from pdserve.engine.plan.forms import FLOAT32, ActivationDtype as Type;"
        f"print(of({KERNELS!r}, Type.FLOAT32, FLOAT32))"
    )
    words = (python, "-P", "-c", code)
    child = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    told, _ = await child.communicate()
    assert child.returncode == 0
    return told.decode()


class OfEither(ForkedChild):
    """A process of this build, which is forked, or of the earlier one, which has a Python."""

    def _open(
        self, argv: Sequence[str], pass_fds: Sequence[int], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        kind = Child if argv[0] == "env" else ForkedChild
        return kind._open(self, argv, pass_fds, environment)


class Mixed(Fleet):
    """A fleet of two builds; at first all are of the earlier one."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config, make_child=OfEither)
        self._earlier = {*NODES, COORDINATOR}

    def command_line(self, name: str) -> list[str]:
        """As Fleet's, in the interpreter of the build, which does not look into this tree."""
        words = super().command_line(name)
        other = ["env", "PYTHONSAFEPATH=1", str(python_of())]  # the processes that it starts, too
        return [*other, *words[1:]] if name in self._earlier else words

    async def replace(self, name: str) -> Span:
        """End a process as an operator does, and start the other build in its place.

        Returns when it was started, and was there.
        """
        end = await self.drain_node(name)
        assert end.returncode == 0, f"{end.name}: {end.account}"
        self._earlier ^= {name}
        began_s = monotonic()
        await self.start_node(name)
        return began_s, monotonic()


class Load:
    """Clients that ask for one answer after the other, and come again when they are told to."""

    def __init__(self, url: str) -> None:
        self.outputs: list[tuple[int, Output]] = []
        self.arrivals: list[list[float]] = []  # of the tokens of each answer
        self._url = url
        self._is_over = False
        self._tasks = [asyncio.create_task(self._run(length)) for length in LENGTHS * 2]

    async def more(self, number: int) -> None:
        """Wait until so many more have been answered."""
        most, deadline_s = len(self.outputs) + number, monotonic() + PATIENT_S
        while len(self.outputs) < most:
            assert monotonic() < deadline_s, f"{len(self.outputs)} answers"
            await asyncio.sleep(AGAIN_S)

    async def end(self) -> list[tuple[int, Output]]:
        self._is_over = True
        await asyncio.gather(*self._tasks)
        return self.outputs

    async def _run(self, length: int) -> None:
        async with Client(self._url, PATIENT_S) as client:
            while not self._is_over:
                output, arrivals = await asked(client, length)
                self.outputs.append((length, output))
                self.arrivals.append(arrivals)
                await asyncio.sleep(AGAIN_S)  # others are to get on, too


async def asked(client: Client, length: int) -> tuple[Output, list[float]]:
    """One answer, from whichever coordinator is there, and when each of its tokens came."""
    deadline_s = monotonic() + PATIENT_S
    while True:
        try:
            async with client.stream(make_prompt(60, length), length) as stream:
                output, arrivals = await heard(stream)
            if output.status != 503 or output.retry_after is None:
                return output, arrivals
            why: Any = output.error
        except aiohttp.ClientConnectionError as error:  # not of an answer that has begun
            why = error
        assert monotonic() < deadline_s, why
        await asyncio.sleep(AGAIN_S)


async def heard(stream: Stream) -> tuple[Output, list[float]]:
    """A stream, to its end."""
    output, arrivals = stream.output, list[float]()
    while not output.is_done and await stream.read_line():
        arrivals += [monotonic()] * (len(output.token_ids) - len(arrivals))
    return output, arrivals


class Felt(NamedTuple):
    """What streams felt in one part of a run."""

    gaps_ms: list[float]  # between two messages with tokens
    tpots_ms: list[float]  # of each answer that is long enough to have one

    def __str__(self) -> str:
        gap_ms, worst_gap_ms, tpot_ms, worst_tpot_ms = self.percentiles
        return (
            f"gaps p50/p99 (ms) {gap_ms:.1f}/{worst_gap_ms:.1f} of {len(self.gaps_ms)}, "
            f"TPOT {tpot_ms:.1f}/{worst_tpot_ms:.1f} of {len(self.tpots_ms)}"
        )

    @property
    def percentiles(self) -> tuple[float, float, float, float]:
        """The 50th and the 99th of both."""
        gaps, tpots = (np.percentile(each, (50, 99)).tolist() for each in self)
        return *gaps, *tpots


def felt(arrivals: Sequence[Sequence[float]], rollout: Span, starts: Sequence[Span]) -> list[Felt]:
    """What streams felt without and with a rollout.

    All processes share a few cores here, also with one that starts, as they would not elsewhere:
    gaps in which one starts count nowhere.
    """
    undisturbed, during = Felt([], []), Felt([], [])
    for times in arrivals:
        gaps = [gap for gap in pairwise(times) if not any(overlap(gap, start) for start in starts)]
        for gap in (gap for gap in gaps if gap[0] < gap[1]):
            of = during if overlap(gap, rollout) else undisturbed
            of.gaps_ms.append(1e3 * (gap[1] - gap[0]))
        if len(gaps) >= TPOT_GAPS:
            of = during if overlap((times[0], times[-1]), rollout) else undisturbed
            of.tpots_ms.append(1e3 * sum(end_s - begin_s for begin_s, end_s in gaps) / len(gaps))
    return [undisturbed, during]


def is_smooth(undisturbed: Felt, during: Felt) -> bool:
    """Whether TPOT p99 is within a step, a usual gap, of what it is without a rollout.

    That is, but for what chance brings: it is about the longest of so few. And 99 of 100 gaps are
    at most half as long again: the longest of each answer is the first, in which its KV moves.
    """
    gap_ms, worst_gap_ms, _, worst_tpot_ms = undisturbed.percentiles
    num_slower = sum(tpot_ms > worst_tpot_ms + gap_ms for tpot_ms in during.tpots_ms)
    return num_slower <= MOST_BY_CHANCE and during.percentiles[1] <= MOST_LONGER * worst_gap_ms


def overlap(first: Span, second: Span) -> bool:
    return first[0] < second[1] and second[0] < first[1]


@pytest.mark.parametrize(
    "order",
    [
        (COORDINATOR, *reversed(NODES)),
        (*NODES, COORDINATOR, "decode-0", COORDINATOR, "prefill-0"),
    ],
    ids=["coordinator first", "nodes first, and back"],
)
async def test_a_build_is_rolled_out_under_load(
    order: Sequence[str], tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of both pools in turn; so either build prefills for the other, and decodes for it."""
    digests = [await arithmetic_of(python) for python in (Path(sys.executable), python_of())]
    assert len({*digests}) == 1, f"kernels compute other bits since {EARLIER}: pin a later commit"
    config = fleet_config(tiny_checkpoint, prefill=2, decode=2, engine={"kernels": KERNELS})
    others = psutil.cpu_percent(1.0)
    fleet = Mixed(replace(config, start_s=STARTED_S))
    async with running(fleet):
        async with Client(fleet.url, PATIENT_S) as client:
            expected = {length: (await asked(client, length))[0].tokens for length in LENGTHS}
        # As many as in the rollout: of more answers, the longest is longer.
        load, starts, quiet = Load(fleet.url), [], 3 * len(order) * len(LENGTHS)
        await load.more(quiet)
        began_s = monotonic()
        for name in order:
            starts.append(await fleet.replace(name))
            await load.more(2 * len(LENGTHS))  # from what is there now
            await nothing_was_lost(fleet)
        rollout = began_s, monotonic()
        await load.more(quiet)
        outputs = await load.end()
    undisturbed, during = felt(load.arrivals, rollout, starts)
    others = max(others, psutil.cpu_percent(1.0))
    words = f"undisturbed: {undisturbed}; during the rollout: {during}"
    if others > MOST_OTHERS:
        words += f"; not judged: others have {others:.0f} % of the cores"
    with capsys.disabled():
        print(words)  # noqa: T201
    assert others > MOST_OTHERS or is_smooth(undisturbed, during), words
    wrong = [(n, out) for n, out in outputs if out.error or out.tokens != expected[n]]
    assert not wrong, f"{len(wrong)} of {len(outputs)}: {wrong[0]}"
    assert {len(expected[length]) for length in LENGTHS} == {*LENGTHS}
    pairs = {(output.prefill_node, output.decode_node) for _, output in outputs}
    assert pairs == {*product(NODES[:2], NODES[2:])}


async def nothing_was_lost(fleet: Fleet) -> None:
    """Nor computed again, nor misunderstood, on any node so far."""
    for name, address in (await fleet.metrics_addresses()).items():
        gauges = await read_gauges(address)
        assert {what: gauges[what] for what in LOSSES} == dict.fromkeys(LOSSES, 0), name
