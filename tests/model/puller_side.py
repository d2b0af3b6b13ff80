"""What a puller can do in a world: `decode_node/` in the small, over the real block pool."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.model import pools
from tests.model.puller_intake import IntakeRules
from tests.model.tables import Tables
from tests.model.world import (
    NUM_BLOCKS,
    REQUESTS,
    Config,
    Intake,
    Kind,
    Message,
    Move,
    Mutation,
    Phase,
    Puller,
    World,
    blank_cells,
)


class PullerSide:
    """The moves of one configuration's puller. Every method gives a new world."""

    def __init__(self, config: Config, tables: Tables) -> None:
        self._config = config
        self._intakes = IntakeRules(config, tables)

    # ---- what can happen -----------------------------------------------------------------------

    def arrivals(self, world: World) -> Iterator[Move]:
        """New requests."""
        if world.puller.is_up and world.exporter.is_up:
            for request in self._startable(world):
                yield f"puller starts {request}", partial(self._start, world, request)

    def progress(self, world: World) -> Iterator[Move]:
        """What goes on by itself."""
        puller = world.puller
        if not puller.is_up:
            return
        for request in REQUESTS:
            intake = puller.intakes[request]
            if intake.pull is not None:
                yield from self._intakes.go_on(world, request, intake.pull)
            elif intake.phase is Phase.RUNNING and intake.heard:
                yield (
                    f"puller begins to pull {request}",
                    partial(self._intakes.begin, world, request),
                )
            elif intake.phase is Phase.HELD:
                finish = partial(self._intakes.finish, world, request, Phase.OVER)
                yield f"puller finishes {request}", finish
            if self._config.coordinator and self._is_failed_there(world, request):
                cancel = partial(self._cancel, world, request)
                yield f"coordinator cancels {request} on puller", cancel
        if any(self._is_dead(world, intake) for intake in puller.intakes):
            yield "puller sees that the exporter is gone", partial(self._lose_exporter, world)

    def hazards(self, world: World) -> Iterator[Move]:
        """What may happen, or not."""
        puller = world.puller
        if puller.is_up:
            for request in REQUESTS:
                intake = puller.intakes[request]
                is_told = intake.pull is not None and intake.pull.is_cancelled
                if intake.phase in (Phase.RUNNING, Phase.HELD) and not is_told:
                    if self._config.cancels:
                        cancel = partial(self._cancel, world, request)
                        yield f"user cancels {request} on puller", cancel
                    if intake.pull is not None:
                        yield (
                            f"the read of {request} breaks",
                            partial(self._intakes.breaks, world, request),
                        )
            if puller.life < self._config.puller_crashes:
                yield "puller crashes", partial(self._crash, world)
        elif puller.life < self._config.puller_crashes:
            yield "puller restarts", partial(self._restart, world)

    def receive(self, world: World, message: Message) -> World:
        """One message of the exporter's."""
        request, ticket = message.request, message.ticket
        intake = world.puller.intakes[request]
        if intake.phase is not Phase.RUNNING:
            return world
        if message.kind == Kind.ENDED:
            return self._cancel(world, request)
        if ticket.step < intake.num_pulled or ticket in intake.heard:
            return world  # said twice
        return world.with_intake(request, intake._replace(heard=(*intake.heard, ticket)))

    # ---- requests ------------------------------------------------------------------------------

    def _startable(self, world: World) -> list[int]:
        intakes = world.puller.intakes
        begun = [intake.phase is not Phase.NEW for intake in intakes]
        begun_there = [leg.phase is not Phase.NEW for leg in world.exporter.legs]
        again = self._config.mutation is Mutation.IDS_AGAIN
        return [
            r
            for r in REQUESTS
            if (
                not begun[r]
                # The requests are alike, so that it is always the first one that comes first.
                and (r == 0 or begun[0] or begun_there[0])
            )
            or (
                again and intakes[r].phase in (Phase.OVER, Phase.FAILED) and intakes[r].attempt == 0
            )
        ]

    def _start(self, world: World, request: int) -> World:
        old = world.puller.intakes[request]
        attempt = old.attempt + (old.phase is not Phase.NEW)
        intake = Intake(Phase.RUNNING, attempt, world.exporter.life)
        world = world.with_intake(request, intake)
        return self._intakes.send(world, request, Kind.SUBSCRIBE)

    def _cancel(self, world: World, request: int) -> World:
        intake = world.puller.intakes[request]
        if intake.phase is Phase.HELD:
            return self._intakes.finish(world, request, Phase.FAILED)
        if intake.phase is not Phase.RUNNING:
            return world
        if intake.pull is None:
            return self._intakes.fail(world, request)
        pull = intake.pull._replace(is_cancelled=True)
        if self._config.mutation is Mutation.FREE_IN_FLIGHT:
            world = self._intakes.finish(world, request, Phase.FAILED)
            gone = world.puller.intakes[request]._replace(pull=pull)
            return world.with_intake(request, gone)
        return world.with_intake(request, intake._replace(pull=pull))

    def _is_failed_there(self, world: World, request: int) -> bool:
        intake = world.puller.intakes[request]
        leg = world.exporter.legs[request]
        return (
            intake.phase is Phase.RUNNING
            and not (intake.pull is not None and intake.pull.is_cancelled)
            and leg.phase is Phase.FAILED
            and leg.attempt == intake.attempt
        )

    # ---- lives ---------------------------------------------------------------------------------

    def _is_dead(self, world: World, intake: Intake) -> bool:
        """Whether its exporter is gone, and it has not heard of it."""
        exporter = world.exporter
        is_gone = intake.source_life < exporter.life or not exporter.is_up
        is_told = intake.pull is not None and intake.pull.is_cancelled
        return intake.phase is Phase.RUNNING and is_gone and not is_told

    def _lose_exporter(self, world: World) -> World:
        life = world.exporter.life + (not world.exporter.is_up)
        left = tuple(m for m in world.to_puller if m.exporter_life >= life)
        world = world._replace(to_puller=left)
        if self._config.mutation is Mutation.FORMER_LIVES:
            return world  # it goes on with what it has heard
        for request, intake in enumerate(world.puller.intakes):
            if self._is_dead(world, intake):
                world = self._cancel(world, request)
        return world

    def _crash(self, world: World) -> World:
        intakes = tuple(
            intake
            if intake.phase in (Phase.NEW, Phase.OVER)
            else Intake(Phase.FAILED, intake.attempt)
            for intake in world.puller.intakes
        )
        puller = Puller(
            world.puller.life,
            False,
            pools.new_pool(NUM_BLOCKS),
            blank_cells(self._config),
            intakes,
        )
        return world._replace(puller=puller, to_puller=())

    def _restart(self, world: World) -> World:
        return world.with_puller(life=world.puller.life + 1, is_up=True)
