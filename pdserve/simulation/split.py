"""The cores that a prefill and a decode node of a simulated host share: multiplexed mode.

Nodes ask as real ones do (`pdserve/node/split_cores`), and a running step goes on faster or slower
as soon as the other node begins or has nothing to compute. What cores are worth follows from the
calibration of a node that has half of them: prompts are divided among all cores, and decodes, too,
up to what two nodes that decode beside each other get out of their memory bus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pdserve.core_rule import Slowdowns
from pdserve.engine.request import Scheduled
from pdserve.measured.calibration import Sharing
from pdserve.node.split_cores.demand import Demand, RestDemand, StreamDemand
from pdserve.perf_model import StepShape
from pdserve.protocol import NodeRole
from pdserve.settings.config import PolicyConfig
from pdserve.simulation.events import Events
from pdserve.simulation.machine import Machine

Ended = Callable[[float], None]
"""Is called at the end of a step, with the seconds that it took."""


class Share(Protocol):
    """The cores of one node."""

    @property
    def pair(self) -> object:
        """The same for both nodes."""
        ...

    def begin(
        self, rows: Sequence[Scheduled], shape: StepShape, seconds: float, ended: Ended
    ) -> None:
        """Begin a step that takes so long on the cores of a node that has its own."""
        ...

    def release(self) -> None:
        """Note that the node has nothing to compute."""
        ...


@dataclass(slots=True)
class _Step:
    """A step that runs, at a speed that may change."""

    shape: StepShape
    ended: Ended
    left_s: float  # on the cores of a node that has its own
    began_s: float
    seen_s: float  # until when `left_s` is right
    speed: float = 1.0
    cores: int = 0
    core_s: float = 0.0  # cores that it has had, times seconds
    number: int = 0  # of its scheduled end; earlier ones are void


class SplitCores:
    """The two nodes of a pair."""

    def __init__(
        self, events: Events, machine: Machine, threads: int, bus: Sharing, policy: PolicyConfig
    ) -> None:
        """
        Args:
            events: of the simulation.
            machine: what was calibrated: a node with `threads` cores of its own.
            threads: half of the cores of the pair.
            bus: what two nodes of a host cost each other.
            policy: of both nodes.
        """
        self.num_cores = 2 * threads
        self._events = events
        self._threads = threads
        self._both_decode = 2 / min(2.0, bus.decode_beside_decode)  # speed on all cores
        self._asked: dict[NodeRole, int] = {}
        self._running: dict[NodeRole, _Step] = {}
        all_s = self._decode_speed(self.num_cores)
        numbers = range(1, self.num_cores + 1)
        slowdowns = Slowdowns(numbers, [all_s / self._decode_speed(n) for n in numbers])
        streams = StreamDemand(
            machine.perf(1 / all_s), slowdowns, self.num_cores, events, policy.default_tpot_s
        )
        self._demands: dict[NodeRole, Demand] = {
            NodeRole.PREFILL: RestDemand(),
            NodeRole.DECODE: streams,
        }

    def share(self, role: NodeRole) -> Share:
        """Return the share of the node that has this role."""
        return _OfRole(self, role)

    def begin(
        self,
        role: NodeRole,
        rows: Sequence[Scheduled],
        shape: StepShape,
        seconds: float,
        ended: Ended,
    ) -> None:
        """As Share.begin."""
        now_s = self._events.now_s
        self._asked[role] = self._demands[role].cores(rows)
        self._running[role] = _Step(shape, ended, seconds, now_s, now_s)
        self._follow()

    def release(self, role: NodeRole) -> None:
        """As Share.release."""
        if self._asked.pop(role, 0):
            self._follow()

    def allowed(self, role: NodeRole) -> int:
        """Return the cores that a node may use now."""
        if role.other not in self._asked:
            return self.num_cores
        if role is NodeRole.DECODE:
            return self._asked.get(role, 1)
        return self.num_cores - self._asked[NodeRole.DECODE]

    def speed(self, shape: StepShape, cores: int) -> float:
        """Return how fast such a step is, where it is 1 on the cores of a node of its own."""
        return self._decode_speed(cores) if shape.is_decode else cores / self._threads

    def _decode_speed(self, cores: int) -> float:
        share = cores / self._threads
        return min(share, 1 + (self._both_decode - 1) * (share - 1)) if share > 1 else share

    def _follow(self) -> None:
        """Let both nodes' steps go on with the cores that they have now."""
        now_s = self._events.now_s
        for role, step in self._running.items():
            passed_s = now_s - step.seen_s
            step.left_s -= passed_s * step.speed
            step.core_s += passed_s * step.cores
            step.seen_s = now_s
            step.cores = self.allowed(role)
            step.speed = self.speed(step.shape, step.cores)
            step.number += 1
            end = partial(self._end, role, step, step.number)
            self._events.after(max(0.0, step.left_s / step.speed), end)

    def _end(self, role: NodeRole, step: _Step, number: int) -> None:
        if self._running.get(role) is not step or step.number != number:
            return  # it goes on at another speed
        del self._running[role]
        now_s = self._events.now_s
        seconds = now_s - step.began_s
        step.core_s += (now_s - step.seen_s) * step.cores
        self._demands[role].stepped(step.shape, seconds, step.core_s / seconds if seconds else 0.0)
        step.ended(seconds)


@dataclass(frozen=True, slots=True)
class _OfRole:
    """A Share."""

    pair: SplitCores
    role: NodeRole

    def begin(
        self, rows: Sequence[Scheduled], shape: StepShape, seconds: float, ended: Ended
    ) -> None:
        """As Share.begin."""
        self.pair.begin(self.role, rows, shape, seconds, ended)

    def release(self) -> None:
        """As Share.release."""
        self.pair.release(self.role)
