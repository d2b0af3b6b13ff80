"""Lets the faults of a plan happen to a cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pdserve.protocol import NodeRole
from pdserve.shared.errors import PdserveError
from tests.lives.faults import Fault
from tests.lives.loop import Process
from tests.lives.network import NOBODY
from tests.lives.node import NodeProcess

if TYPE_CHECKING:
    from tests.lives.life import World


class Fate:
    """What goes wrong in one life."""

    def __init__(self, world: World) -> None:
        self._world = world

    def strike(self, fault: Fault) -> None:
        """Let a fault happen now."""
        world = self._world
        node = world.nodes[fault.node]
        world.trace.note("fault", fault.kind, node, fault)
        if node in world.graveyard:
            return  # it has died before, and is not back yet
        other = world.nodes[fault.other] if fault.other != fault.node else world.coordinator
        network, machine = world.network, node.machine
        match fault.kind:
            case "crash":
                world.kill(node, "kill -9")
            case "host lost":
                world.kill(node, "with its host", silently=True)
            case "freeze":
                self._freeze(node, fault.for_s)
            case "pause coordinator":
                self._freeze(world.coordinator, min(fault.for_s, 3.0))
            case "cut" | "one-way cut" | "refuse":
                is_refused, both = fault.kind == "refuse", fault.kind != "one-way cut"
                network.cut(node, other, refuses=is_refused, both_ways=both)
                self._later(fault.for_s, network.heal, node, other)
            case "slow link":
                network.way(node, other).slowness = network.way(other, node).slowness = 100.0
                self._later(fault.for_s, network.heal, node, other)
            case "slow node":
                machine.slowness = 5.0
                self._later(fault.for_s, setattr, machine, "slowness", 1.0)
            case "drain":
                world.trace.note("drain", node)
                node.call(node.signals.drain.set)
            case "flip":
                self._order(node, world.other_role(node))
            case "bad steps":
                machine.num_bad_steps += fault.amount
            case "stuck step":
                machine.hangs = True
            case "dead thread":
                machine.is_dead = True
            case "failing pulls":
                world.pulls.num_failing += fault.amount
            case "corrupt pulls":
                world.pulls.num_corrupt += fault.amount

    def heal(self) -> None:
        """Let nothing be wrong any more, as far as somebody outside can see to it."""
        world = self._world
        everybody = [*world.nodes, world.coordinator]
        for process in everybody:
            if process.is_stopped and process not in world.graveyard:
                self._thaw(process)
        for one in everybody:
            for other in everybody:
                if one not in world.graveyard and other not in world.graveyard:
                    world.network.heal(one, other)
        self._later(8.0, self._staff)

    # ---- parts ---------------------------------------------------------------------------------

    def _freeze(self, process: Process, seconds: float) -> None:
        if not process.is_stopped:
            process.stop()
            self._world.network.frozen(process)
            self._later(seconds, self._thaw, process)

    def _thaw(self, process: Process) -> None:
        if process.is_stopped and process not in self._world.graveyard:
            self._world.trace.note("goes on", process)
            process.go_on()

    def _order(self, node: NodeProcess, role: NodeRole) -> None:
        self._world.coordinator.call(self._try_order, node, role)

    def _try_order(self, node: NodeProcess, role: NodeRole) -> None:
        try:
            self._world.coordinator.changes.order(node.name, role)
        except PdserveError as error:
            self._world.trace.note("refused", node, role.name, error.code)

    def _staff(self) -> None:
        """Have a node in each pool that the mode needs, whatever has flipped."""
        world = self._world
        members = list(world.coordinator.registry)
        needed = {
            "disaggregated": [NodeRole.PREFILL, NodeRole.DECODE],
            "colocated": [NodeRole.DECODE],
            "adaptive": [],
        }[world.plan.mode]
        for role in needed:
            if members and all(member.role is not role for member in members):
                world.coordinator.call(self._try_order, world.nodes[0], role)

    def _later(self, seconds: float, function: Callable[..., object], *args: object) -> None:
        self._world.loop.call_later(seconds, partial(function, *args), context=NOBODY)
