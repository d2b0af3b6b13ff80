"""The cores of a simulated node that computes both phases side by side: multiplexed mode.

Steps ask as real ones do (`pdserve/node/split_cores`), and a running step goes on faster or slower
as soon as one of the other phase begins or there is none. What cores are worth follows from the
calibration of a node that has half of them: prompts are divided among all cores, and decodes, too,
up to what two nodes that decode beside each other get out of their memory bus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, NamedTuple

from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.host import Host, Work
from pdserve.commands.simulation.machine import Machine
from pdserve.engine.request import Scheduled
from pdserve.measured.calibration import Sharing
from pdserve.measured.perf_model import StepShape
from pdserve.node.split_cores.demand import CoreDemand, RestDemand, StreamDemand
from pdserve.rules.cores import Slowdowns
from pdserve.settings.config import PolicyConfig

Phase = Literal["prefill", "decode"]
PREFILL: Final = "prefill"
DECODE: Final = "decode"


class Took(NamedTuple):
    """What a step took."""

    seconds: float
    slowdown: float = 1.0  # as Demand.slowdown
    share: float = 1.0  # of the node's cores


Ended = Callable[[Took], None]
"""Is called at the end of a step."""


@dataclass(slots=True)
class _Step:
    """A step that runs, at a speed that may change."""

    work: Work
    shape: StepShape
    ended: Ended
    began_s: float
    seen_s: float  # until when `core_s` is right
    asked: int  # cores
    cores: int = 0
    core_s: float = 0.0  # cores that it has had, times seconds


class SplitCores:
    """The cores of one node, that are twice as many as the calibrated one had."""

    def __init__(
        self,
        events: Events,
        host: Host,
        machine: Machine,
        threads: int,
        bus: Sharing,
        policy: PolicyConfig,
    ) -> None:
        """
        Args:
            events: of the simulation.
            host: of the node.
            machine: what was calibrated: a node with `threads` cores.
            threads: half of the cores of this one.
            bus: what two nodes of a host cost each other.
            policy: of the node.
        """
        self.num_cores = 2 * threads
        self._events = events
        self._host = host
        self._threads = threads
        self._both_decode = 2 / min(2.0, bus.decode_beside_decode)  # speed on all cores
        self._asked: dict[Phase, int] = {}
        self._running: dict[Phase, _Step] = {}
        all_s = self._decode_speed(self.num_cores)
        numbers = range(1, self.num_cores + 1)
        slowdowns = Slowdowns(numbers, [all_s / self._decode_speed(n) for n in numbers])
        self.perf = machine.perf()  # the node's, for decodes on all cores but one
        self.perf.decode_ratio = 1 / self._decode_speed(self.num_cores - 1)
        streams = StreamDemand(self.perf, slowdowns, self.num_cores, events, policy.default_tpot_s)
        self._demands: dict[Phase, CoreDemand] = {PREFILL: RestDemand(), DECODE: streams}

    def begin(
        self,
        loop: object,
        phase: Phase,
        rows: Sequence[Scheduled],
        shape: StepShape,
        seconds: float,
        ended: Ended,
    ) -> None:
        """Begin a step of a loop that takes so long on the cores of the calibrated node."""
        now_s = self._events.now_s
        self._asked[phase] = asked = self._demands[phase].cores(rows)
        work = self._host.begin(loop, shape, seconds, partial(self._end, phase))
        self._running[phase] = _Step(work, shape, ended, now_s, now_s, asked)
        self._follow()

    def release(self, phase: Phase) -> None:
        """Note that there is nothing to compute in this phase."""
        if self._asked.pop(phase, 0):
            self._follow()

    def allowed(self, phase: Phase) -> int:
        """Return the cores that a phase may use now."""
        if (DECODE if phase == PREFILL else PREFILL) not in self._asked:
            return self.num_cores
        if phase == DECODE:
            return self._asked.get(phase, 1)
        return self.num_cores - self._asked[DECODE]

    def speed(self, shape: StepShape, cores: int) -> float:
        """Return how fast such a step is, where it is 1 on the cores of the calibrated node."""
        return self._decode_speed(cores) if shape.is_decode else cores / self._threads

    def _decode_speed(self, cores: int) -> float:
        share = cores / self._threads
        return min(share, 1 + (self._both_decode - 1) * (share - 1)) if share > 1 else share

    def _follow(self) -> None:
        """Let both phases' steps go on with the cores that they have now."""
        now_s = self._events.now_s
        for phase, step in self._running.items():
            step.core_s += (now_s - step.seen_s) * step.cores
            step.seen_s = now_s
            step.cores = self.allowed(phase)
            self._host.go_on(step.work, self.speed(step.shape, step.cores))

    def _end(self, phase: Phase) -> None:
        step = self._running.pop(phase)
        now_s = self._events.now_s
        seconds = now_s - step.began_s
        step.core_s += (now_s - step.seen_s) * step.cores
        cores = step.core_s / seconds if seconds else 0.0
        slowdown = self._demands[phase].slowdown(step.asked, cores)
        step.ended(Took(seconds, slowdown, cores / self.num_cores))
