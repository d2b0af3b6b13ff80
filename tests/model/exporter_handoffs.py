"""An exporter's handoffs: `prefill_node/handoffs.py` in the small."""

from __future__ import annotations

from kv_transfer.lifecycle import ExporterMove, ExporterState
from tests.model import pools
from tests.model.exporter_memory import ExporterMemory
from tests.model.tables import Tables
from tests.model.world import (
    NOBODY,
    Config,
    Handoff,
    Kind,
    Leg,
    Message,
    Mutation,
    Ticket,
    Violation,
    World,
    sent,
)


class HandoffRules:
    """What is announced, to whom, and how it ends. Every method gives a new world."""

    def __init__(self, config: Config, tables: Tables, memory: ExporterMemory) -> None:
        self._config = config
        self._tables = tables
        self._memory = memory
        self._mutation = config.mutation

    def announce(self, world: World, request: int, leg: Leg) -> World:
        handoff = world.exporter.handoffs[request]
        if handoff is None:
            return world
        index = leg.num_steps - 1
        step = self._config.steps[index]
        blocks = leg.table[step.first_block : step.end_block]
        new = tuple(b for b in blocks if b not in handoff.blocks)
        if new and self._mutation is not Mutation.NO_REFERENCE:
            world = world.with_exporter(pool=pools.retain(world.exporter.pool, new).state)
        states = dict(zip(handoff.blocks, handoff.states, strict=True))
        is_whole = step.end_layer == self._config.num_layers
        move = ExporterMove.ANNOUNCE if is_whole else ExporterMove.ANNOUNCE_PART
        for block_id in blocks:
            state = states.get(block_id, ExporterState.FREE)
            if state is ExporterState.FREE:
                state = self._tables.exporter(state, ExporterMove.HOLD)
            states[block_id] = self._tables.exporter(state, move)
        ticket = self._issue(world, request, index, blocks)
        handoff = handoff._replace(
            blocks=tuple(states), states=tuple(states.values()), said=(*handoff.said, ticket)
        )
        return self._say(world.with_handoff(request, handoff), handoff, ticket)

    def _issue(self, world: World, request: int, step: int, blocks: tuple[int, ...]) -> Ticket:
        generations = world.memories[-1].generations
        return Ticket(
            request, step, blocks, tuple(generations[b] for b in blocks), world.exporter.life
        )

    def _say(self, world: World, handoff: Handoff, ticket: Ticket) -> World:
        if handoff.subscriber == NOBODY:
            return world
        message = Message(
            Kind.TICKET,
            ticket.request,
            handoff.subscriber,
            world.exporter.life,
            handoff.attempt,
            ticket,
        )
        return self._send(world, message)

    def end(self, world: World, request: int) -> World:
        """There is nothing more to pull."""
        handoff = world.exporter.handoffs[request]
        if handoff is None:
            return world
        world = self._drop(world, request, handoff)
        if handoff.subscriber == NOBODY:
            return world
        life, attempt = world.exporter.life, handoff.attempt
        ended = Message(Kind.ENDED, request, handoff.subscriber, life, attempt)
        return self._send(world, ended)

    def _drop(self, world: World, request: int, handoff: Handoff) -> World:
        for state in handoff.states:
            self._tables.exporter(state, ExporterMove.RELEASE)
        world = world.with_handoff(request, None)
        return self._memory.release(world, handoff.blocks)

    def lease(self, handoff: Handoff) -> Handoff:
        return handoff._replace(has_lease=self._mutation is not Mutation.NO_LEASE)

    # ---- what pullers say ----------------------------------------------------------------------

    def subscribe(self, world: World, message: Message) -> World:
        request = message.request
        handoff = world.exporter.handoffs[request] or Handoff(False, message.attempt)
        if handoff.subscriber == message.puller_life and handoff.is_open and not handoff.said:
            return world  # there is nothing to say again
        handoff = handoff._replace(subscriber=message.puller_life)
        handoff = handoff._replace(has_lease=False) if handoff.is_open else self.lease(handoff)
        return self._say_all(world.with_handoff(request, handoff), request)

    def settle(self, world: World, message: Message) -> World:
        """By its subscriber; else a former one is meant."""
        handoff = world.exporter.handoffs[message.request]
        if handoff is None or handoff.subscriber != message.puller_life:
            return world
        if handoff.attempt != message.attempt:
            raise Violation("a settle of a former attempt ended the handoff of a later one")
        return self._drop(world, message.request, handoff)

    def renew(self, world: World, message: Message) -> World:
        handoff = world.exporter.handoffs[message.request]
        if handoff is None or handoff.subscriber != message.puller_life:
            return world
        return self._say_all(world, message.request)

    def _say_all(self, world: World, request: int) -> World:
        """All that was announced, with fresh tickets."""
        handoff = world.exporter.handoffs[request]
        assert handoff is not None
        if not handoff.said:
            return world
        for state in handoff.states:
            self._tables.exporter(state, ExporterMove.RENEW)
        said = tuple(self._issue(world, request, t.step, t.block_ids) for t in handoff.said)
        handoff = handoff._replace(said=said)
        world = world.with_handoff(request, handoff)
        for ticket in said:
            world = self._say(world, handoff, ticket)
        return world

    def has_dead_sessions(self, world: World) -> bool:
        return any(
            self._is_dead(world, life)
            for life in [
                *(h.subscriber for h in world.exporter.handoffs if h is not None),
                *(m.puller_life for m in world.to_exporter),
            ]
        )

    def _is_dead(self, world: World, life: int) -> bool:
        return life != NOBODY and (life < world.puller.life or not world.puller.is_up)

    def lose_puller(self, world: World) -> World:
        """The sessions with its former lives end, and what they had not delivered with them."""
        left = tuple(m for m in world.to_exporter if not self._is_dead(world, m.puller_life))
        world = world._replace(to_exporter=left)
        for request, handoff in enumerate(world.exporter.handoffs):
            if handoff is not None and self._is_dead(world, handoff.subscriber):
                alone = self.lease(handoff._replace(subscriber=NOBODY))
                world = world.with_handoff(request, alone)
        return world

    def _send(self, world: World, message: Message) -> World:
        return world._replace(to_puller=sent(self._config, world.to_puller, message))
