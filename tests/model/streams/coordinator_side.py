"""What the coordinator does with the stream: `coordinator/requests` in the small."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.model.streams.world import (
    NODES,
    NUM_OUTPUT,
    Config,
    Further,
    Kind,
    Message,
    Move,
    Moving,
    Mutation,
    Status,
    World,
)
from tests.model.world import NOBODY, Violation, replaced


class CoordinatorSide:
    """Every method gives a new world."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._mutation = config.mutation

    # ---- what can happen -----------------------------------------------------------------------

    def progress(self, world: World) -> Iterator[Move]:
        """What goes on by itself."""
        coordinator = world.coordinator
        for node in NODES:
            here, is_member = world.nodes[node], coordinator.members[node]
            if not here.is_up and is_member:
                yield f"coordinator sees that {node} is gone", partial(self._lose, world, node)
            elif not (here.is_cut or is_member) and _is_forgotten(world, node):
                yield f"{node} joins", partial(self._join, world, node)
            if coordinator.owner == NOBODY and is_member and coordinator.status is Status.LIVE:
                yield f"the stream is sent to {node} again", partial(self._resume, world, node)
        if coordinator.move is not None:
            yield "the move waits no longer", partial(self._carry_out, world)
        if coordinator.successor is not None:
            yield "the takeover takes too long", partial(self._end_takeover, world)
        for index, message in enumerate(world.to_coordinator):
            if self._config.in_order and _is_behind(world, index):
                continue
            left = (*world.to_coordinator[:index], *world.to_coordinator[index + 1 :])
            name = f"coordinator hears {message.kind.name} of {message.attempt}"
            if message.kind is Kind.TOKEN:
                name += f" at {message.number} from {message.node}"
            yield name, partial(self._hear, world._replace(to_coordinator=left), message)

    def hazards(self, world: World) -> Iterator[Move]:
        """What may happen, or not."""
        coordinator, budget = world.coordinator, world.budget
        if coordinator.status is not Status.LIVE:
            return
        if self._config.cancels:
            yield "user cancels", partial(self._cancel, world)
        if budget.cuts:
            for node in NODES:
                if coordinator.members[node] and world.nodes[node].is_up:
                    yield f"{node} is taken for lost", partial(self._cut, world, node)
        can_move = coordinator.owner != NOBODY and coordinator.move is None
        can_move = can_move and coordinator.successor is None
        if budget.moves and can_move and coordinator.further is Further.NOTHING:
            target = 1 - coordinator.owner
            if coordinator.shown and coordinator.members[target]:
                yield f"a move to {target} begins", partial(self._begin_move, world, target)
        if budget.takeovers and can_move and coordinator.further is Further.NOTHING:
            target = 1 - coordinator.owner
            if coordinator.shown and coordinator.members[target]:
                yield f"{target} is to take it over", partial(self._begin_takeover, world, target)

    # ---- nodes ---------------------------------------------------------------------------------

    def _join(self, world: World, node: int) -> World:
        """Another life of it, or a new link of the same."""
        members = replaced(world.coordinator.members, node, True)
        return world.with_node(node, is_up=True).with_coordinator(members=members)

    def _lose(self, world: World, node: int) -> World:
        members = replaced(world.coordinator.members, node, False)
        world = world.with_coordinator(members=members)
        world = world._replace(to_nodes=replaced(world.to_nodes, node, ()))
        successor = world.coordinator.successor
        if successor is not None and successor.target == node:
            world = self._end_takeover(world)
        if world.coordinator.owner != node or world.coordinator.status is not Status.LIVE:
            return world
        return self._interrupt(world)

    def _cut(self, world: World, node: int) -> World:
        """What the node has said may still arrive; what it was told does not."""
        budget = world.budget._replace(cuts=world.budget.cuts - 1)
        return self._lose(world.with_node(node, is_cut=True)._replace(budget=budget), node)

    # ---- the stream ----------------------------------------------------------------------------

    def _withdraw(self, world: World) -> World:
        """Take it from its node; it will have another name."""
        world = self._end_takeover(world)
        coordinator = world.coordinator
        shown = coordinator.shown
        if self._mutation is Mutation.RESUMED_AFTER_GAP:
            shown += len(coordinator.early)
        attempt = coordinator.num_attempts + 1
        if self._mutation is Mutation.SAME_ATTEMPT:
            attempt = coordinator.attempt
        if self._mutation is not Mutation.SOURCE_GOES_ON:
            cancel = Message(Kind.CANCEL, coordinator.attempt)
            world = world.tell_node(coordinator.owner, cancel)
        return world.with_coordinator(
            owner=NOBODY, attempt=attempt, num_attempts=attempt, early=(), shown=shown
        )

    def _interrupt(self, world: World) -> World:
        return self._withdraw(world).with_coordinator(is_interrupted=True)

    def _send(self, world: World, node: int) -> World:
        coordinator = world.coordinator
        source = 1 - node if world.nodes[1 - node].is_up else NOBODY
        leg = Message(Kind.LEG, coordinator.attempt, source, coordinator.shown)
        return world.tell_node(node, leg).with_coordinator(owner=node)

    def _resume(self, world: World, node: int) -> World:
        return self._send(world, node).with_coordinator(further=Further.GOES_ON)

    def _begin_move(self, world: World, target: int) -> World:
        coordinator = world.coordinator
        budget = world.budget._replace(moves=world.budget.moves - 1)
        moving = Moving(coordinator.attempt, target, coordinator.num_attempts + 1)
        prefetch = Message(Kind.PREFETCH, moving.attempt, coordinator.owner, coordinator.shown)
        world = world._replace(budget=budget).tell_node(target, prefetch)
        return world.with_coordinator(move=moving)

    def _carry_out(self, world: World) -> World:
        moving = world.coordinator.move
        assert moving is not None
        world = world.with_coordinator(move=None)
        if not self._runs_there(world, moving) or not world.coordinator.members[moving.target]:
            return world
        world = self._send(self._withdraw(world), moving.target)
        if self._mutation is Mutation.LOST_IF_REFUSED:
            world = world.with_coordinator(owner=moving.target, is_interrupted=False)
        return world.with_coordinator(further=Further.NOTHING)

    def _begin_takeover(self, world: World, target: int) -> World:
        coordinator = world.coordinator
        attempt = coordinator.num_attempts + 1
        budget = world.budget._replace(takeovers=world.budget.takeovers - 1)
        take = Message(
            Kind.TAKE, attempt, coordinator.owner, coordinator.shown, takes=coordinator.attempt
        )
        world = world._replace(budget=budget).tell_node(target, take)
        num_attempts = attempt - (self._mutation is Mutation.USED_AGAIN)
        successor = Moving(coordinator.attempt, target, attempt)
        return world.with_coordinator(successor=successor, num_attempts=num_attempts)

    def _end_takeover(self, world: World) -> World:
        """Have nobody take it over; whether it has ended where it was, its last token says."""
        successor = world.coordinator.successor
        if successor is None:
            return world
        world = world.tell_node(successor.target, Message(Kind.CANCEL, successor.attempt))
        return world.with_coordinator(successor=None)

    def _ends_there(self, world: World, token: Message) -> World:
        """It has ended where it was, with this token."""
        coordinator = world.coordinator
        successor = coordinator.successor
        if successor is not None:
            world = world.with_coordinator(
                owner=successor.target, attempt=successor.attempt, successor=None
            )
            return self._take(world, token, of=coordinator.owner)
        world = self._take(world, token)
        if self._mutation is Mutation.END_UNHEEDED:
            return world
        is_live = world.coordinator.status is Status.LIVE
        return self._interrupt(world) if is_live else world

    def _runs_there(self, world: World, moving: Moving) -> bool:
        coordinator = world.coordinator
        is_same = coordinator.attempt == moving.source_attempt and coordinator.owner != NOBODY
        return is_same and coordinator.status is Status.LIVE

    def _cancel(self, world: World) -> World:
        coordinator = world.coordinator
        if coordinator.owner != NOBODY:
            cancel = Message(Kind.CANCEL, coordinator.attempt)
            world = world.tell_node(coordinator.owner, cancel)
        return self._end_takeover(world).with_coordinator(status=Status.CANCELLED)

    # ---- what nodes say ------------------------------------------------------------------------

    def _hear(self, world: World, message: Message) -> World:
        coordinator = world.coordinator
        if coordinator.status is not Status.LIVE:
            return world
        if message.kind is Kind.PREFETCHED:
            return self._prefetched(world, message)
        is_of_this = message.attempt == coordinator.attempt and coordinator.owner != NOBODY
        if message.kind is Kind.TOKEN:
            successor = coordinator.successor
            if successor is not None and successor.attempt == message.attempt:
                return self._take(world, message, of=successor.target)
            if not is_of_this and self._mutation is not Mutation.ANY_ATTEMPT:
                return world
            if message.is_last:
                return self._ends_there(world, message)
            return self._take(world, message)
        if coordinator.successor is not None and coordinator.successor.attempt == message.attempt:
            return self._end_takeover(world)
        return self._failed(world) if is_of_this else world

    def _prefetched(self, world: World, message: Message) -> World:
        moving = world.coordinator.move
        if moving is None or (moving.attempt, moving.target) != (message.attempt, message.node):
            return world
        is_late = self._mutation is Mutation.LATE_PREFETCHED
        if not is_late and not self._runs_there(world, moving):
            return world
        return world.with_coordinator(further=Further.CARRY_OUT)

    def _take(self, world: World, token: Message, of: int | None = None) -> World:
        """Take a token of the owner, or of the node that it has been taken from or goes to."""
        coordinator = world.coordinator
        if token.number < coordinator.shown:
            return world
        emits = coordinator.owner if of is None else of
        if token.node != emits:
            raise Violation(f"a token of node {token.node} is shown, and the stream is on {emits}")
        shown, early = coordinator.shown, tuple(sorted({*coordinator.early, token.number}))
        if self._mutation is Mutation.SHOWN_AS_THEY_COME:
            shown = token.number
        if early[0] > shown:
            return world.with_coordinator(early=early)
        while early and early[0] == shown:
            if shown != world.coordinator.num_seen:
                raise Violation(f"token {shown} is shown after {world.coordinator.num_seen}")
            world = world.with_coordinator(num_seen=shown + 1)
            shown, early = shown + 1, early[1:]
        further = coordinator.further
        world = world.with_coordinator(shown=shown, early=early, further=Further.NOTHING)
        if further is Further.GOES_ON:
            world = world.with_coordinator(is_interrupted=False)
        if shown == NUM_OUTPUT:
            world = self._end_takeover(world)
            return world.with_coordinator(status=Status.DONE, is_interrupted=False)
        if world.coordinator.is_interrupted:
            raise Violation("the stream goes on, and still counts as interrupted")
        if further is Further.CARRY_OUT and coordinator.move is not None:
            world = self._carry_out(world)
        return world

    def _failed(self, world: World) -> World:
        """Its node did not take it, or had to give it up."""
        coordinator = world.coordinator
        if self._mutation is Mutation.LOST_IF_REFUSED and not coordinator.is_interrupted:
            return world
        if self._mutation is Mutation.BACK_TO_SOURCE and coordinator.attempt > 0:
            former = coordinator.attempt - 1
            return world.with_coordinator(owner=1 - coordinator.owner, attempt=former)
        return self._interrupt(world)


def _is_forgotten(world: World, node: int) -> bool:
    """Whether nobody reads the memory of a node's former life any more: it may have another."""
    if world.nodes[node].is_up:
        return True
    return not any(fetch.source == node for fetch in world.nodes[1 - node].fetches)


def _is_behind(world: World, index: int) -> bool:
    """Whether the same node has said something else before."""
    node = world.to_coordinator[index].node
    return any(message.node == node for message in world.to_coordinator[:index])
