"""A host whose nodes share one memory bus, and cores with each other and with services.

A step has a thread on each of its node's cores, and a service one thread, on the core that fewest
others want. Threads on a core have equal shares of it, as the kernel gives those of equal niceness.
So whenever something begins or ends, all that runs goes on at another speed.

What steps take of the bus from each other is as calibrated: profiles do not show it, since each
node measures itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from pdserve.commands.cluster.placement import assign_cores
from pdserve.commands.simulation.events import Action, Events
from pdserve.measured.calibration import Sharing
from pdserve.measured.perf_model import StepShape

_OVER_S = 1e-9  # left of what has ended, but for rounding


@dataclass(slots=True, eq=False)
class Work:
    """Something that runs on cores."""

    left_s: float  # that it takes where it does not wait for anything
    ended: Action
    cores: Sequence[int]  # of a step: it has a thread on each; of a service: on one of these
    shape: StepShape | None = None  # of a step
    pace: float = 1.0  # speed of a step on cores that nothing else uses
    core: int = -1  # of a service
    speed: float = 0.0


@dataclass(slots=True, eq=False)
class _Place:
    """Where a node, or one of its loops, computes."""

    owner: object  # the same for loops each of which computes on the cores of all of them
    share: list[int] = field(default_factory=list)  # cores
    step: Work | None = None  # that it computes now


class Host:
    """A host, its nodes and services, and what runs there at the moment."""

    def __init__(
        self, name: str, events: Events, sharing: Sharing | None = None, threads: int = 1
    ) -> None:
        """
        Args:
            name: of the host.
            events: of the simulation.
            sharing: its cores, and what steps cost each other; by default nothing.
            threads: that a node computes with.
        """
        self.name = name
        self._sharing = sharing or Sharing()
        self._threads = threads
        self._events = events
        self._places: dict[object, _Place] = {}  # by loop
        self._services: list[Work] = []  # what each does now
        self._seen_s = 0.0  # until when what is left of everything is right
        self._number = 0  # of the next end; earlier ones are void
        self._turn = 0  # which of several cores is the choice of the next service

    @property
    def is_shared(self) -> bool:
        """Whether a step here depends on what else there is."""
        return self._sharing != Sharing()

    @property
    def is_computing(self) -> bool:
        """Whether any step runs now."""
        return any(place.step for place in self._places.values())

    @property
    def spare_cores(self) -> list[int]:
        """Cores on which nothing computes, if nodes have more than threads; else all of them."""
        spare = [core for place in self._places.values() for core in place.share[self._threads :]]
        return spare or list(range(self._sharing.cores))

    def service_cores(self, node: object) -> list[int]:
        """Return where the event loop of a node that has joined runs: beside its steps, if it can.

        Call it when all nodes have joined.
        """
        places, owner = self._places.values(), self._places[node].owner
        cores = [place.share for place in places if place.owner == owner]
        spare = [core for share in cores for core in share[self._threads :]]
        return spare or [core for share in cores for core in share]

    def join(self, node: object, owner: object = None) -> None:
        """Add a node, or one of its loops, in the order in which a cluster is started.

        Args:
            node: which computes one step at a time.
            owner: is the same for loops each of which computes on the cores of all of them.
        """
        self._places[node] = _Place(node if owner is None else owner)
        num_cores = self._sharing.cores or len(self._places)
        shares = assign_cores(len(self._places), range(num_cores))
        for place, share in zip(self._places.values(), shares, strict=True):
            place.share = share

    def begin(
        self, node: object, shape: StepShape, seconds: float, ended: Action, pace: float = 1.0
    ) -> Work:
        """Begin a step.

        Args:
            node: one that has joined, and whose last step has ended.
            shape: of the step.
            seconds: that it takes alone, at pace 1.
            ended: is called at its end.
            pace: of the step at first; see `go_on`.
        """
        place = self._places[node]
        step = Work(seconds, ended, self._cores_of(place.owner), shape, pace)
        self._advance()
        place.step = step
        self._follow()
        return step

    def go_on(self, step: Work, pace: float) -> None:
        """Change the pace of a running step: its node has more or fewer cores for it."""
        self._advance()
        step.pace = pace
        self._follow()

    def serve(self, work: Work) -> None:
        """Begin what a service does next."""
        self._advance()
        self._services.append(work)
        self._follow()

    def _cores_of(self, owner: object) -> list[int]:
        places = self._places.values()
        return [c for place in places if place.owner == owner for c in place.share[: self._threads]]

    def _running(self) -> list[Work]:
        steps = [place.step for place in self._places.values() if place.step is not None]
        return steps + self._services

    def _advance(self) -> None:
        """Bring what is left of everything up to the present."""
        passed_s = self._events.now_s - self._seen_s
        self._seen_s = self._events.now_s
        if passed_s:
            for work in self._running():
                work.left_s -= passed_s * work.speed

    def _follow(self) -> None:
        """Let everything go on at the speed that it has now."""
        used, running = self._used(), self._running()
        for work in running:
            if work.shape is None:
                work.speed = 1 / used[work.core] if used else 1.0
                continue
            work.speed = work.pace / self._waits_for_bus(work)
            if used:
                own = self._node_threads(work.cores)
                work.speed *= fmean([own / used[core] for core in work.cores])
        self._number += 1
        if running:
            first_s = min([work.left_s / work.speed for work in running])
            self._events.after(max(0.0, first_s), partial(self._end, self._number))

    def _used(self) -> list[float]:
        """Return how many threads want each core, after choosing those of services.

        As the kernel does, a service that has to wait looks for a core that is idle, or that fewer
        others are on; of equal ones, each is chosen in turn.
        """
        used = [0.0] * self._sharing.cores
        if not used:
            return used
        num_there = [0] * len(used)
        busy = {place.owner: place.step for place in self._places.values() if place.step}
        for place in self._places.values():
            if step := busy.get(place.owner):
                cores = place.share[: self._threads]
                for core in cores:
                    used[core] += self._node_threads(step.cores) * self._threads / len(cores)
                    num_there[core] += 1
        for work in self._services:
            fewest = min([num_there[core] for core in work.cores])
            if work.core < 0 or num_there[work.core] > fewest:
                equal = [core for core in work.cores if num_there[core] == fewest]
                work.core = equal[self._turn % len(equal)]
                self._turn += 1
            num_there[work.core] += 1
            used[work.core] += 1
        return used

    def _node_threads(self, cores: Sequence[int]) -> float:
        """Return how many threads of a node that has a step on these cores want each of them."""
        steps = [place.step for place in self._places.values() if place.step]
        decodes = any(s.shape and s.shape.decode_context and s.cores == cores for s in steps)
        return self._sharing.node_threads if decodes else 1.0

    def _waits_for_bus(self, step: Work) -> float:
        shapes = [
            place.step.shape
            for place in self._places.values()
            if place.step is not None and place.step is not step
        ]
        if not shapes or step.shape is None:
            return 1.0
        sharing, is_decode = self._sharing, step.shape.is_decode
        if any(shape is not None and shape.is_decode for shape in shapes):
            return sharing.decode_beside_decode if is_decode else sharing.prompt_beside_decode
        return sharing.decode_beside_prompt if is_decode else sharing.prompt_beside_prompt

    def _end(self, number: int) -> None:
        if number != self._number:
            return  # something has begun, or goes on at another speed
        self._advance()
        over = [work for work in self._running() if work.left_s <= _OVER_S]
        self._services = [work for work in self._services if work not in over]
        for place in self._places.values():
            if place.step in over:
                place.step = None
        self._follow()
        for work in over:
            work.ended()


@dataclass(slots=True)
class Task:
    """Something that a service does. Until it begins, more may be added."""

    seconds: float  # that it takes where it does not wait for a core
    thens: list[Action]  # what follows
    began_s: float | None = None


class Service:
    """A process beside the engines: its event loop does one thing after the other."""

    def __init__(self, events: Events, host: Host, cores: Sequence[int]) -> None:
        """Run on one of these cores of a host at a time."""
        self.busy_s = 0.0  # for how long there was something to do
        self._events = events
        self._host = host
        self._cores = cores
        self._queue: deque[Task] = deque()

    def do(self, seconds: float, then: Action) -> Task:
        """Do something that takes so long where it does not wait for a core, and call `then`."""
        task = Task(seconds, [then])
        self._queue.append(task)
        if len(self._queue) == 1:
            self._begin()
        return task

    def _begin(self) -> None:
        task = self._queue[0]
        task.began_s = self._events.now_s
        if task.seconds > 0:
            self._host.serve(Work(task.seconds, self._done, self._cores))
        else:
            self._done()

    def _done(self) -> None:
        task = self._queue.popleft()
        assert task.began_s is not None
        self.busy_s += self._events.now_s - task.began_s
        if self._queue:
            self._begin()
        for then in task.thens:
            then()
