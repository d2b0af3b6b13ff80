"""One request's intake: `decode_node/arrival.py` in the small, and the read it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kv_transfer.lifecycle import PullerMove, PullerState
from tests.model import pools
from tests.model.tables import Tables
from tests.model.world import (
    NUM_PROMPT_BLOCKS,
    SCRAP,
    Config,
    Intake,
    Kind,
    Message,
    Move,
    Mutation,
    Phase,
    Pull,
    World,
    replaced,
    sent,
)


class IntakeRules:
    """From the first announcement to adoption. Every method gives a new world."""

    def __init__(self, config: Config, tables: Tables) -> None:
        self._config = config
        self._tables = tables
        self._mutation = config.mutation

    def begin(self, world: World, request: int) -> World | None:
        """Take room if there is none yet, and start to read what was heard first."""
        intake = world.puller.intakes[request]
        if not intake.table:
            roomy = self._reserve(world, request, intake)
            if roomy is None:
                return None
            world = roomy
            intake = world.puller.intakes[request]
        ticket, *later = intake.heard
        intake = intake._replace(heard=tuple(later))
        step = self._config.steps[ticket.step]
        if ticket.step != intake.num_pulled:
            return self.fail(world.with_intake(request, intake), request)
        first = step.first_block
        if self._mutation is not Mutation.PULL_OVER_PREFIX:
            first = min(max(first, intake.num_reused), step.end_block)
        destinations = intake.table[first : step.end_block]
        states = dict(zip(intake.table, intake.states, strict=True))
        for block_id in destinations:
            states[block_id] = self._tables.puller(states[block_id], PullerMove.PULL)
        life = ticket.life
        if self._mutation is Mutation.FORMER_LIVES:
            life = world.exporter.life  # of the session there is now, whatever the ticket says
        elif life != intake.source_life:
            return self.fail(world.with_intake(request, intake), request)
        sources = ticket.block_ids[first - step.first_block :]
        expected = ticket.generations[first - step.first_block :]
        pull = Pull(ticket, life, sources, expected, destinations)
        intake = intake._replace(pull=pull, states=tuple(states.values()))
        world = world.with_intake(request, intake)
        return world if destinations else self._validate(world, request)

    def _reserve(self, world: World, request: int, intake: Intake) -> World | None:
        num_blocks = NUM_PROMPT_BLOCKS + self._config.num_own_blocks
        reserved = pools.reserve(world.puller.pool, num_blocks, self._config.hashes(request))
        if reserved is None:
            return None
        outcome, table, num_reused = reserved
        reuse = self._tables.puller
        states = [reuse(PullerState.FREE, PullerMove.REUSE) for _ in range(num_reused)]
        states += [
            self._tables.puller(PullerState.FREE, PullerMove.RESERVE) for _ in table[num_reused:]
        ]
        world = world.with_puller(pool=outcome.state)
        return world.with_intake(
            request,
            intake._replace(table=table, states=tuple(states), num_reused=num_reused),
        )

    # ---- a read --------------------------------------------------------------------------------

    def go_on(self, world: World, request: int, pull: Pull) -> Iterator[Move]:
        """The read's next steps: copy block by block, then look at generation by generation."""
        num_blocks = len(pull.destinations)
        can_copy = pull.num_copied < num_blocks
        can_compare = pull.num_compared < num_blocks and not pull.is_cancelled
        if self._mutation is Mutation.COMPARE_FIRST:
            can_copy = can_copy and not can_compare
        else:
            can_compare = can_compare and not can_copy
        if can_copy:
            yield f"a block of {request} is copied", partial(self._copy, world, request)
        if can_compare:
            yield f"a generation of {request} is compared", partial(self._compare, world, request)
        if pull.is_cancelled:
            yield f"the cancelled read of {request} ends", partial(self.fail, world, request)

    def _copy(self, world: World, request: int) -> World:
        intake = world.puller.intakes[request]
        pull = intake.pull
        assert pull is not None
        step = self._config.steps[pull.ticket.step]
        source = world.memories[pull.life].cells[pull.sources[pull.num_copied]]
        destination = pull.destinations[pull.num_copied]
        row = world.puller.cells[destination]
        layers = slice(step.first_layer, step.end_layer)
        row = (*row[: layers.start], *source[layers], *row[layers.stop :])
        world = world.with_puller(cells=replaced(world.puller.cells, destination, row))
        pull = pull._replace(num_copied=pull.num_copied + 1)
        world = world.with_intake(request, intake._replace(pull=pull))
        return self._validate(world, request) if self._has_ended(pull) else world

    def _compare(self, world: World, request: int) -> World:
        intake = world.puller.intakes[request]
        pull = intake.pull
        assert pull is not None
        block_id, expected = (
            pull.sources[pull.num_compared],
            pull.expected[pull.num_compared],
        )
        if world.memories[pull.life].generations[block_id] != expected:
            return self.fail(world, request)
        pull = pull._replace(num_compared=pull.num_compared + 1)
        world = world.with_intake(request, intake._replace(pull=pull))
        return self._validate(world, request) if self._has_ended(pull) else world

    def _has_ended(self, pull: Pull) -> bool:
        return not pull.is_cancelled and (
            pull.num_copied == pull.num_compared == len(pull.destinations)
        )

    def _validate(self, world: World, request: int) -> World:
        intake = world.puller.intakes[request]
        assert intake.pull is not None
        step = self._config.steps[intake.pull.ticket.step]
        is_whole = step.end_layer == self._config.num_layers
        move = PullerMove.VALIDATE if is_whole else PullerMove.VALIDATE_PART
        intake = self._end_pull(intake, move)._replace(num_pulled=intake.num_pulled + 1)
        world = world.with_intake(request, intake)
        if intake.num_pulled < len(self._config.steps):
            return world
        return self._adopt(self.send(world, request, Kind.SETTLE), request)

    def breaks(self, world: World, request: int) -> World:
        intake = world.puller.intakes[request]
        if self._mutation is Mutation.ADOPT_UNREAD:
            world = world.with_intake(request, intake._replace(pull=None))
            return self._adopt(self.send(world, request, Kind.SETTLE), request)
        if not self._config.renews or intake.has_renewed:
            return self.fail(world, request)
        intake = self._end_pull(intake, PullerMove.FAIL)._replace(heard=(), has_renewed=True)
        return self.send(world.with_intake(request, intake), request, Kind.RENEW)

    def _end_pull(self, intake: Intake, move: PullerMove) -> Intake:
        assert intake.pull is not None
        states = dict(zip(intake.table, intake.states, strict=True))
        for block_id in intake.pull.destinations:
            states[block_id] = self._tables.puller(states[block_id], move)
        return intake._replace(states=tuple(states.values()), pull=None)

    # ---- the end of an intake ------------------------------------------------------------------

    def _adopt(self, world: World, request: int) -> World:
        """The engine's now; what it has to compute itself it does at once."""
        intake = world.puller.intakes[request]
        num_layers = self._config.num_layers
        states, cells = [], list(world.puller.cells)
        for index, (block_id, state) in enumerate(zip(intake.table, intake.states, strict=True)):
            is_prompt = index < NUM_PROMPT_BLOCKS
            is_read = is_prompt and (
                state is PullerState.VALID or self._mutation is Mutation.ADOPT_UNREAD
            )
            move = PullerMove.ADOPT if is_read else PullerMove.ADOPT_BLANK
            states.append(self._tables.puller(state, move))
            if not is_read:
                datum = self._config.datum(request, index) if is_prompt else SCRAP
                cells[block_id] = (datum,) * num_layers
        world = world.with_puller(cells=tuple(cells))
        hashes = self._config.hashes(request)
        for block_id, block_hash in zip(intake.table, hashes, strict=False):
            outcome = pools.publish(world.puller.pool, block_id, block_hash)
            world = world.with_puller(pool=outcome.state)
        adopted = Intake(Phase.HELD, intake.attempt, table=intake.table, states=tuple(states))
        return world.with_intake(request, adopted)

    def fail(self, world: World, request: int) -> World:
        """Settle; then either the blocks go back, or the engine computes what is missing."""
        intake = world.puller.intakes[request]
        if intake.phase is not Phase.RUNNING:  # FREE_IN_FLIGHT: it has long been given up
            return world.with_intake(request, intake._replace(pull=None))
        is_cancelled = intake.pull is None or intake.pull.is_cancelled
        if intake.pull is not None:
            intake = self._end_pull(intake, PullerMove.FAIL)
            world = world.with_intake(request, intake)
        world = self.send(world, request, Kind.SETTLE)
        if self._config.recomputes and not is_cancelled:
            return self._adopt(world, request)
        for state in intake.states:
            self._tables.puller(state, PullerMove.RELEASE)
        return self.finish(world, request, Phase.FAILED)

    def finish(self, world: World, request: int, phase: Phase) -> World:
        intake = world.puller.intakes[request]
        if intake.table:
            outcome = pools.release(world.puller.pool, intake.table)
            world = world.with_puller(pool=outcome.state)
        return world.with_intake(request, Intake(phase, intake.attempt))

    def send(self, world: World, request: int, kind: Kind) -> World:
        intake = world.puller.intakes[request]
        if not world.exporter.is_up or intake.source_life < world.exporter.life:
            return world  # into a session that nobody reads any more
        message = Message(kind, request, world.puller.life, intake.source_life, intake.attempt)
        bag = sent(self._config, world.to_exporter, message)
        return world._replace(to_exporter=bag)
