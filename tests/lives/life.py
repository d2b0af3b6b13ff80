"""Lives one life: makes the cluster of a plan, lets it happen, and has it judged."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass
from random import Random
from typing import Any

from pdserve.protocol import NodeRole
from pdserve.settings.config import Mode
from tests.lives import checker
from tests.lives.checker import LogListener
from tests.lives.coordinator import CoordinatorProcess
from tests.lives.fate import Fate
from tests.lives.loop import VirtualLoop
from tests.lives.network import NOBODY, Network
from tests.lives.node import NodeProcess
from tests.lives.plan import TIMEOUTS, Plan, make_plan
from tests.lives.seams import seams
from tests.lives.trace import Trace
from tests.lives.transport import Pulls

ALL_MODES: tuple[Mode, ...] = ("disaggregated", "colocated", "adaptive")
SETTLED_S = 90.0  # after the last fault, within which every request has ended
TOLD_S = 1.0  # after the last request, when every node knows that it has nothing to compute
FREE_S = 30.0  # after the last request, within which everything is free again
LOOK_S = 0.25
KEEPALIVE_S = 3 * TIMEOUTS.liveness_s


@dataclass
class Life:
    """What is left of a life when it is over."""

    seed: int
    plan: Plan
    trace: Trace
    wrong: list[str]
    counts: dict[str, int]
    digest: str  # equal for equal lives


class World:
    """A cluster that lives."""

    def __init__(
        self,
        loop: VirtualLoop,
        plan: Plan,
        random: Random,
        trace: Trace,
        network: Network,
        pulls: Pulls,
    ) -> None:
        self.loop = loop
        self.plan = plan
        self.random = random
        self.trace = trace
        self.network = network
        self.pulls = pulls
        self.coordinator = CoordinatorProcess(
            loop, network, plan.mode, TIMEOUTS, plan.max_inflight, plan.declared
        )
        self.nodes: list[NodeProcess] = []
        self.graveyard: list[NodeProcess] = []
        self.buried: list[asyncio.Task[Any]] = []  # kept: what is collected runs its `finally`s
        self.is_over = False
        self.num_deaths = 0
        self.wrong: list[str] = []  # of processes that ended by themselves

    async def live(self) -> list[str]:
        """From the first start to the last end; returns what is wrong."""
        plan = self.plan
        self.coordinator.start()
        for number in range(len(plan.nodes)):
            self.nodes.append(self.made(number))
        fate = Fate(self)
        start_s = self.loop.time()
        for asked in [*plan.orders, *plan.calls]:
            self.loop.call_at(
                start_s + asked.at_s,
                asked.start,
                self.coordinator,
                self.trace,
                context=self.coordinator.context,
            )
        for fault in plan.faults:
            self.loop.call_at(start_s + fault.at_s, fate.strike, fault, context=NOBODY)
        last_s = max(
            [fault.at_s + fault.for_s for fault in plan.faults] + [c.at_s for c in plan.calls]
        )
        await asyncio.sleep(last_s + 0.01)
        fate.heal()
        if not await self._until(lambda: all(call.is_over for call in plan.calls), SETTLED_S):
            return checker.unfinished(self)
        wrong = checker.answers(self)
        await asyncio.sleep(TOLD_S)
        wrong += checker.idle(self)
        await self._until(lambda: not checker.leaks(self), FREE_S)
        return wrong + checker.leaks(self)

    async def end(self) -> list[str]:
        """All nodes drain and end; returns what they leave behind."""
        self.is_over = True
        for node in self.nodes:
            node.signals.drain.set()
        lives = [node.life for node in self.nodes if node.life is not None]
        await asyncio.wait(lives, timeout=TIMEOUTS.drain_s + 5)
        await asyncio.sleep(LOOK_S)
        return checker.left_behind(self)

    async def bury(self) -> None:
        """End the tasks of those that have crashed, so that nothing of them runs later."""
        tasks = list(self.buried)
        for node in [*self.graveyard, *self.nodes]:
            tasks += node.tasks
        tasks += self.coordinator.tasks
        for task in tasks:
            task.cancel()
        for process in [*self.graveyard, *self.nodes, self.coordinator]:
            process.go_on()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    def made(self, number: int) -> NodeProcess:
        """A node process of the plan, which starts."""
        planned = self.plan.nodes[number]
        process = NodeProcess(
            self.loop, planned.config, planned.role, planned.num_blocks, self.random, self.kill
        )
        self.trace.note("start", planned.config.node_id, planned.role.name)
        process.start(self._ended)
        return process

    def kill(self, process: NodeProcess, why: str, *, silently: bool = False) -> None:
        """End a process at once."""
        if process in self.graveyard:
            return
        self.trace.note("dies", process, why)
        self.num_deaths += 1
        process.stop()
        self._gone(process, silently=silently)

    def restart_later(self, process: NodeProcess, seconds: float) -> None:
        """Start a process with the same id."""
        if process in self.nodes:
            number = self.nodes.index(process)
            self.loop.call_later(seconds, self._restart, number, process, context=NOBODY)

    async def _until(self, holds: Any, seconds: float) -> bool:
        end_s = self.loop.time() + seconds
        while not holds():
            if self.loop.time() > end_s:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    def _ended(self, process: NodeProcess) -> None:
        """A process has ended by itself."""
        if self.is_over or process in self.graveyard:
            return
        assert process.life is not None
        error = None if process.life.cancelled() else process.life.exception()
        if error is not None:
            self.wrong.append(f"{process} ended with {error!r}")
        self.trace.note("ends", process, error)
        self._gone(process, silently=False)

    def _gone(self, process: NodeProcess, *, silently: bool) -> None:
        self.graveyard.append(process)
        self.buried += process.tasks
        self.network.vanish(process, silently=silently)
        self.restart_later(process, self.random.choice([0.05, 0.5, 1.5]))

    def _restart(self, number: int, former: NodeProcess) -> None:
        if self.nodes[number] is former and not self.is_over:
            self.nodes[number] = self.made(number)

    def other_role(self, process: NodeProcess) -> NodeRole:
        """The pool that the node is not in."""
        member = self.coordinator.registry.find(process.name)
        is_prefill = member is not None and member.role is NodeRole.PREFILL
        return NodeRole.DECODE if is_prefill else NodeRole.PREFILL


def live(
    seed: int,
    *,
    modes: tuple[Mode, ...] = ALL_MODES,
    num_faults: int | None = None,
    plan: Plan | None = None,
) -> Life:
    """Live the life of this seed, or this plan with chances of this seed."""
    plan = plan or make_plan(seed, modes=modes, num_faults=num_faults)
    with LogListener() as heard, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.get_loop().set_exception_handler(heard.exception)
        gc.disable()  # what is collected runs code of its own, at times of its own
        try:
            return runner.run(_lived(seed, plan, heard))
        finally:
            gc.enable()


async def _lived(seed: int, plan: Plan, heard: LogListener) -> Life:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    random, trace = Random(seed + 1_000_000), Trace()
    network = Network(loop, random, trace, KEEPALIVE_S)
    pulls = Pulls(network, random, plan.is_two_sided, slowness=plan.pulls_slowness)
    with seams(network, pulls, Random(seed + 2_000_000)):
        world = World(loop, plan, random, trace, network, pulls)
        wrong = await world.live()
        counts = checker.counts(world)
        if not wrong:
            wrong = await world.end()
        life = Life(seed, plan, trace, world.wrong + wrong + heard.wrong, counts, trace.digest)
        counts["callbacks"] = loop.num_callbacks
        heard.is_muted = True
        await world.bury()
    return life
