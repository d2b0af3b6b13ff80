"""What an exporter can do in a world: `prefill_node/` in the small, over the real block pool."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.model import pools
from tests.model.exporter_handoffs import HandoffRules
from tests.model.exporter_memory import ExporterMemory
from tests.model.tables import Tables
from tests.model.world import (
    NOBODY,
    NUM_BLOCKS,
    NUM_PROMPT_BLOCKS,
    REQUESTS,
    Config,
    Exporter,
    Handoff,
    Kind,
    Leg,
    Message,
    Move,
    Mutation,
    Phase,
    World,
    blank_memory,
)


class ExporterSide:
    """The moves of one configuration's exporter. Every method gives a new world."""

    def __init__(self, config: Config, tables: Tables) -> None:
        self._config = config
        self._memory = ExporterMemory(config)
        self._handoffs = HandoffRules(config, tables, self._memory)
        self._num_steps = len(config.steps)

    # ---- what can happen -----------------------------------------------------------------------

    def arrivals(self, world: World) -> Iterator[Move]:
        """New requests."""
        if world.exporter.is_up:
            for request in self._startable(world):
                yield f"exporter starts {request}", partial(self._start, world, request)

    def progress(self, world: World) -> Iterator[Move]:
        """What goes on by itself."""
        exporter = world.exporter
        if not exporter.is_up:
            return
        if exporter.owed_bumps:
            yield "exporter bumps at last", partial(self._memory.pay_bumps, world)
        for request in REQUESTS:
            leg, handoff = exporter.legs[request], exporter.handoffs[request]
            if leg.phase is Phase.RUNNING:
                yield f"exporter computes {request}", partial(self._compute, world, request)
            if handoff is not None and handoff.has_lease:
                yield f"lease of {request} is over", partial(self._expire, world, request)
            if self._config.coordinator and self._is_failed_there(world, request):
                cancel = partial(self._cancel, world, request)
                yield f"coordinator cancels {request} on exporter", cancel
        if self._handoffs.has_dead_sessions(world):
            yield (
                "exporter sees that the puller is gone",
                partial(self._handoffs.lose_puller, world),
            )

    def hazards(self, world: World) -> Iterator[Move]:
        """What may happen, or not."""
        exporter = world.exporter
        if exporter.is_up:
            for request in REQUESTS:
                is_here = exporter.legs[request].phase in (Phase.RUNNING, Phase.HELD)
                if is_here and self._config.cancels:
                    cancel = partial(self._cancel, world, request)
                    yield f"user cancels {request} on exporter", cancel
            # Without a ticket for a free block, it would only change the blocks' names.
            if not set(exporter.pool.uncached).isdisjoint(world.named_blocks()):
                yield "others come and go on exporter", partial(self._come_and_go, world)
            if exporter.life < self._config.exporter_crashes:
                yield "exporter crashes", partial(self._crash, world)
        elif exporter.life < self._config.exporter_crashes:
            yield "exporter restarts", partial(self._restart, world)

    def receive(self, world: World, message: Message) -> World:
        """One message of the puller's."""
        match message.kind:
            case Kind.SUBSCRIBE:
                return self._handoffs.subscribe(world, message)
            case Kind.SETTLE:
                after = self._handoffs.settle(world, message)
                if after is world:
                    return world
                return self._stop(after, message.request, Phase.OVER)
            case _:
                return self._handoffs.renew(world, message)

    # ---- requests ------------------------------------------------------------------------------

    def _startable(self, world: World) -> list[int]:
        legs = world.exporter.legs
        begun = [leg.phase is not Phase.NEW for leg in legs]
        begun_there = [intake.phase is not Phase.NEW for intake in world.puller.intakes]
        again = self._config.mutation is Mutation.IDS_AGAIN
        return [
            r
            for r in REQUESTS
            if (
                not begun[r]
                # The requests are alike, so that it is always the first one that comes first.
                and (r == 0 or begun[0] or begun_there[0])
            )
            or (again and legs[r].phase in (Phase.OVER, Phase.FAILED) and legs[r].attempt == 0)
        ]

    def _start(self, world: World, request: int) -> World | None:
        exporter = world.exporter
        leg = exporter.legs[request]
        # At least one token must be computed to have logits.
        hashes = self._config.hashes(request)[: NUM_PROMPT_BLOCKS - 1]
        reserved = pools.reserve(exporter.pool, NUM_PROMPT_BLOCKS, hashes)
        if reserved is None:
            return None
        outcome, table, num_reused = reserved
        attempt = leg.attempt + (leg.phase is not Phase.NEW)
        world = world.with_exporter(pool=outcome.state)
        world = world.with_leg(request, Leg(Phase.RUNNING, table, num_reused, 0, attempt))
        world = self._memory.scribble(world, table[num_reused:])
        handoff = world.exporter.handoffs[request] or Handoff(True, attempt)
        return world.with_handoff(
            request, handoff._replace(is_open=True, attempt=attempt, has_lease=False)
        )

    def _compute(self, world: World, request: int) -> World:
        """One step of the engine, and what the node does in its wake."""
        leg = world.exporter.legs[request]
        step = self._config.steps[leg.num_steps]
        hashes = self._config.hashes(request)
        for index in range(max(step.first_block, leg.num_reused), step.end_block):
            datum = self._config.datum(request, index)
            world = self._memory.write(
                world, leg.table[index], step.first_layer, step.end_layer, datum
            )
            if hashes and step.end_layer == self._config.num_layers:
                outcome = pools.publish(world.exporter.pool, leg.table[index], hashes[index])
                world = world.with_exporter(pool=outcome.state)
        leg = leg._replace(num_steps=leg.num_steps + 1)
        world = world.with_leg(request, leg)
        world = self._handoffs.announce(world, request, leg)
        if leg.num_steps < self._num_steps:
            return world
        handoff = world.exporter.handoffs[request]
        if handoff is not None and handoff.subscriber == NOBODY:
            world = world.with_handoff(request, self._handoffs.lease(handoff))
        world = self._memory.release(world, leg.table)  # the engine lets go
        phase = Phase.OVER if handoff is None else Phase.HELD
        return world.with_leg(request, Leg(phase, attempt=leg.attempt))

    def _cancel(self, world: World, request: int) -> World:
        """The coordinator's CancelLeg."""
        world = self._stop(world, request, Phase.FAILED)
        return self._handoffs.end(world, request)

    def _stop(self, world: World, request: int, phase: Phase) -> World:
        """Out of the engine."""
        leg = world.exporter.legs[request]
        if leg.phase not in (Phase.RUNNING, Phase.HELD):
            return world
        world = world.with_leg(request, Leg(phase, attempt=leg.attempt))
        return self._memory.release(world, leg.table)

    def _expire(self, world: World, request: int) -> World:
        handoff = world.exporter.handoffs[request]
        assert handoff is not None
        world = self._handoffs.end(world, request)
        return self._stop(world, request, Phase.FAILED) if handoff.is_open else world

    def _is_failed_there(self, world: World, request: int) -> bool:
        leg = world.exporter.legs[request]
        return (
            leg.phase in (Phase.RUNNING, Phase.HELD)
            and world.puller.intakes[request].phase is Phase.FAILED
            and world.puller.intakes[request].attempt == leg.attempt
        )

    # ---- others, and lives ---------------------------------------------------------------------

    def _come_and_go(self, world: World) -> World:
        """So that who gets which block next is not settled by who had it last."""
        world = self._memory.scribble(world, world.exporter.pool.uncached)
        return self._memory.took_back(world, pools.come_and_go(world.exporter.pool))

    def _crash(self, world: World) -> World:
        """All is lost but the memory, which somebody may have mapped."""
        legs = tuple(
            leg if leg.phase in (Phase.NEW, Phase.OVER) else Leg(Phase.FAILED, attempt=leg.attempt)
            for leg in world.exporter.legs
        )
        exporter = Exporter(
            world.exporter.life, False, pools.new_pool(NUM_BLOCKS), legs, (None, None)
        )
        return world._replace(exporter=exporter, to_exporter=())

    def _restart(self, world: World) -> World:
        exporter = world.exporter._replace(life=world.exporter.life + 1, is_up=True)
        memories = (*world.memories, blank_memory(self._config))
        return world._replace(exporter=exporter, memories=memories)
