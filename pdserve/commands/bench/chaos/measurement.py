"""A run of `pdserve bench chaos`: calls undisturbed, the same under faults, and what is left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, Final

import aiohttp
import msgspec

from pdserve.commands.bench.chaos.calls import KINDS, ChaosCall, make_call, name_for
from pdserve.commands.bench.chaos.clients import HeardStream, perform
from pdserve.commands.bench.chaos.faults import (
    FAULTS,
    FULL_DISK,
    KILL_COORDINATOR,
    NO_DESCRIPTORS,
    STOP_ENGINE,
    FaultTarget,
)
from pdserve.commands.bench.chaos.histories import Excuses, Span, gap_s, judge
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.protocol.status import ClusterStatus
from pdserve.settings.config import ONE_POOL, Mode
from pdserve.shared.errors import ClusterError, PdserveError

LEAKED: Final = "leaked"
_NUMBERS: Final = 3  # calls of each kind that differ
_LEAVES: Final = 0.1  # share of the calls whose client goes away
_LEAVES_AFTER_S: Final = (0.001, 0.01, 0.05, 0.2, 0.5)
_KEYED: Final = 0.5  # share of the others that have an idempotency key
_LOOK_S: Final = 0.02
_READY_S: Final = 240.0  # for all nodes to be ready again, on a machine that does much else
_SETTLE_S: Final = 60.0  # likewise, for all that calls held to be free
_MOST_FILES: Final = 8  # descriptors more than before: connections of the client come and go


class FaultRecord(msgspec.Struct):
    """One fault."""

    kind: str
    hit: str
    began_s: float  # since the first one
    lasted_s: float
    found_s: float | None  # until a node that was hit was no ready member; None: it stayed one


class CallRecord(msgspec.Struct):
    """One call under faults, and what is wrong with it."""

    kind: str
    number: int
    began_s: float
    lasted_s: float
    found: list[tuple[str, str]]


class ChaosReport(msgspec.Struct):
    """What `pdserve bench chaos` reports; grows while it runs."""

    seed: int = 0
    faults: list[FaultRecord] = []
    calls: list[CallRecord] = []
    gaps_s: dict[str, list[float]] = {}  # by kind of fault, of streams that ran
    leaks: list[str] = []
    no_hosts: str = ""  # why nodes are not on hosts of their own; empty: they are
    coordinator_mb: tuple[float, float] = (0.0, 0.0)  # resident, before and after
    lasted_s: float = 0.0
    num_guessed: int = 0  # tokens of all calls that had been guessed, and were right

    def num(self, kind: str) -> int:
        """How many calls were lost, wrong or hung."""
        return sum(any(found == kind for found, _ in call.found) for call in self.calls)

    @property
    def complaints(self) -> list[str]:
        """Everything that is wrong; empty if nothing is."""
        of_calls = [
            f"{call.kind} {call.number} at {call.began_s:.1f} s: {kind}: {words}"
            for call in self.calls
            for kind, words in call.found
        ]
        return of_calls + [f"{LEAKED}: {leak}" for leak in self.leaks]


@dataclass(slots=True)
class Watch:
    """What `/status` has said, all the time."""

    mode: Mode
    seen: list[tuple[float, ClusterStatus | None]] = field(default_factory=list)

    def add(self, status: ClusterStatus | None) -> None:
        """What it says now; None: nothing."""
        self.seen.append((monotonic(), status))

    def outages(self) -> list[Span]:
        """When a pool that requests need had no ready node."""
        spans: list[Span] = []
        began_s: float | None = None
        last_s = 0.0  # when all was well
        for at_s, status in self.seen:
            if self._can_serve(status):
                if began_s is not None:
                    spans.append((began_s, at_s + 1.0))  # and a little to go on
                began_s, last_s = None, at_s
            elif began_s is None:
                began_s = last_s or at_s
        return spans

    def found_s(self, names: Sequence[str], began_s: float, end_s: float) -> float | None:
        """Return how long after `began_s` one of the nodes was no ready member any more."""
        for at_s, status in self.seen:
            if not began_s <= at_s < end_s or status is None:
                continue
            for name in names:
                node = status.node(name)
                if node is None or node.state != "ready":
                    return at_s - began_s
        return None

    def _can_serve(self, status: ClusterStatus | None) -> bool:
        if status is None:
            return False
        ready = {node.role for node in status.nodes if node.state == "ready"}
        needed = {"decode"} if self.mode in ONE_POOL else {"prefill", "decode"}
        return bool(ready) if self.mode in ("adaptive", "flowing") else needed <= ready


class Chaos:
    """A run over one cluster."""

    def __init__(
        self,
        target: FaultTarget,
        names: Sequence[str],
        mode: Mode,
        report: ChaosReport,
        say: Callable[[str], None],
    ) -> None:
        self._target = target
        self._cluster = target.cluster
        self._names = names  # of the model, and adapters that are loaded
        self._report = report
        self._say = say
        self._watch = Watch(mode)
        self._random = Random(f"calls {report.seed}")
        self._references: dict[tuple[str, int], HeardStream] = {}
        self._heard: list[HeardStream] = []
        self._over = asyncio.Event()

    async def run(
        self, kinds: Sequence[str], num_faults: int, at_once: int, pause_s: float
    ) -> None:
        """Make the calls alone, then under faults; then look at what is left.

        Raises:
            ClusterError: an undisturbed call failed, or the nodes do not come back.
        """
        await self._refer(at_once)
        await self._settle()
        report, before = self._report, _files_of(self._cluster.pid(COORDINATOR))
        mb_before = _resident_mb(self._cluster.pid(COORDINATOR))
        began_s = monotonic()
        callers = [self._call_on() for _ in range(at_once)]
        if len(self._names) > 1:
            callers.append(self._target.adapters.come_and_go(self._over))
        async with _going_on(self._keep_running(), self._look()), _going_on(*callers) as calling:
            order = Random(f"faults {report.seed}")
            for number in range(num_faults):
                await self._wait_ready()
                await asyncio.sleep(order.uniform(0.2, 1.0) * pause_s)
                await self._disturb(order.choice(kinds), began_s)
                self._say(f"{number + 1}/{num_faults}: {report.faults[-1].kind}")
            self._over.set()
            await asyncio.gather(*calling)
            await self._wait_ready()
            await self._settle()
        report.lasted_s = monotonic() - began_s
        after = _files_of(self._cluster.pid(COORDINATOR))
        if after > before + _MOST_FILES:
            report.leaks.append(f"the coordinator has {after} open files, {before} before")
        report.coordinator_mb = (mb_before, _resident_mb(self._cluster.pid(COORDINATOR)))
        self._judge(began_s)

    # ---- calls ---------------------------------------------------------------------------------

    async def _refer(self, at_once: int) -> None:
        """Make every call undisturbed."""
        limit = asyncio.Semaphore(at_once)

        async def refer(kind: str, number: int) -> None:
            async with limit:
                heard = await self._perform(make_call(kind, number, self._names))
            if heard.error or heard.num_ends != 1:
                raise ClusterError(f"{kind} {number} failed undisturbed: {heard.error}")
            self._references[kind, number] = heard

        await self._check_names()
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for kind in KINDS:
                    for number in range(_NUMBERS):
                        group.create_task(refer(kind, number))
        except* ClusterError as errors:
            failure = errors.exceptions[0]
        if failure is not None:
            raise failure

    async def _check_names(self) -> None:
        """Raise ClusterError if the same call has one answer for two names."""
        heard = [await self._perform(make_call("greedy", 0, [name])) for name in self._names]
        if len({each.answers.get(0) for each in heard}) < len(self._names):
            raise ClusterError(f"{', '.join(self._names)} answer alike: no mistake would be seen")

    async def _call_on(self) -> None:
        """Make calls, one after the other."""
        while not self._over.is_set():
            kind, number = self._random.choice(list(KINDS)), self._random.randrange(_NUMBERS)
            call = make_call(kind, number, self._names)
            if self._random.random() < _LEAVES:
                call = replace(call, leaves_after_s=self._random.choice(_LEAVES_AFTER_S))
            elif self._random.random() < _KEYED:
                call = replace(call, key=f"call {len(self._heard)} {self._random.random()}")
            self._heard.append(await self._perform(call))

    async def _perform(self, call: ChaosCall) -> HeardStream:
        return await perform(self._target.session, self._cluster.url, call)

    # ---- faults --------------------------------------------------------------------------------

    async def _disturb(self, kind: str, began_s: float) -> None:
        at_s = monotonic()
        hit = await FAULTS[kind](self._target)
        self._report.faults.append(
            FaultRecord(
                kind=kind,
                hit=hit,
                began_s=at_s - began_s,
                lasted_s=monotonic() - at_s,
                found_s=None,
            )
        )

    async def _keep_running(self) -> None:
        """Start again what ends."""
        async with asyncio.TaskGroup() as group:
            while True:
                end = await self._cluster.next_exit()
                group.create_task(self._restart(end.name))

    async def _restart(self, name: str) -> None:
        while not self._cluster.is_running(name):
            with suppress(PdserveError):
                await self._cluster.start_node(name)

    async def _look(self) -> None:
        while True:
            status: ClusterStatus | None = None
            with suppress(ClusterError, TimeoutError):
                async with asyncio.timeout(0.5):
                    status = await self._cluster.status()
            self._watch.add(status)
            await asyncio.sleep(_LOOK_S)

    async def _wait_ready(self) -> None:
        """Wait until all nodes are ready.

        Raises:
            ClusterError: they are not, within _READY_S.
        """
        missing = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(_READY_S):
                while True:
                    with suppress(ClusterError):
                        missing = (await self._cluster.status()).waiting_for(
                            self._cluster.node_names
                        )
                        if not missing:
                            return
                    await asyncio.sleep(_LOOK_S)
        raise ClusterError(f"not ready within {_READY_S:.0f} s: {missing}")

    # ---- the end -------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Wait until nothing is held for anybody; what still is after a while has leaked."""
        left: list[str] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while True:
                    left = _held(await self._cluster.status())
                    if not left:
                        return
                    await asyncio.sleep(0.2)
        self._report.leaks += left

    def _judge(self, began_s: float) -> None:
        faults = self._report.faults

        def spans(kind: str) -> list[Span]:
            """When the coordinator had this fault."""
            return [
                (began_s + fault.began_s, began_s + fault.began_s + fault.lasted_s)
                for fault in faults
                if fault.kind == kind and fault.hit == COORDINATOR
            ]

        ends_s = [began_s + fault.began_s for fault in faults[1:]] + [inf]
        for fault, end_s in zip(faults, ends_s, strict=True):
            at_s = began_s + fault.began_s
            fault.found_s = self._watch.found_s(fault.hit.split(), at_s, end_s)
            gaps = [g for heard in self._heard if (g := gap_s(heard, at_s, end_s)) is not None]
            self._report.gaps_s.setdefault(fault.kind, []).extend(gaps)
        excuses = Excuses(
            outages=[*self._watch.outages(), *self._stuck(began_s)],
            deaths=spans(KILL_COORDINATOR),
            full_disks=spans(FULL_DISK),
            no_descriptors=spans(NO_DESCRIPTORS),
        )
        self._report.num_guessed = sum(heard.num_guessed for heard in self._heard)
        for heard in self._heard:
            reference = self._references[heard.kind, heard.number]
            absent = self._target.adapters.absent.get(name_for(heard.number, self._names), [])
            found = judge(heard, reference, replace(excuses, absent=absent))
            self._report.calls.append(
                CallRecord(
                    kind=heard.kind,
                    number=heard.number,
                    began_s=heard.began_s - began_s,
                    lasted_s=heard.ended_s - heard.began_s,
                    found=found,
                )
            )

    def _stuck(self, began_s: float) -> list[Span]:
        """When a step stood still: a node that finds that out has to wait for it first."""
        return [
            (began_s + fault.began_s, began_s + fault.began_s + fault.found_s)
            for fault in self._report.faults
            if fault.kind == STOP_ENGINE and fault.found_s is not None
        ]


def _held(status: ClusterStatus) -> list[str]:
    """What is held for requests, in words."""
    held = [f"{status.inflight} requests in flight"] if status.inflight or status.waiting else []
    for node in status.nodes:
        numbers = (
            node.num_blocks - node.free_blocks,
            node.pinned_blocks,
            node.queued_tokens,
            node.running_requests + node.waiting_requests,
        )
        if any(numbers):
            words = "{} blocks, {} pinned, {} queued tokens, {} requests".format(*numbers)
            held.append(f"{node.node_id} holds {words}")
    return held


def _files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@asynccontextmanager
async def _going_on(*works: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run coroutines until the context ends, or they have."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def session() -> aiohttp.ClientSession:
    """A client's connections, as many as it has calls."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
