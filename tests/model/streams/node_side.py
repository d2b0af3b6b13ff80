"""What a node does with the stream: `decode_node/`, `pdserve/node`, the engine, in the small."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.model import pools
from tests.model.streams.fetches import FetchRules
from tests.model.streams.world import (
    BLOCK_TOKENS,
    NODES,
    NUM_OUTPUT,
    NUM_PROMPT,
    Config,
    Fetch,
    Kind,
    Leg,
    Message,
    Move,
    Mutation,
    World,
    blank_node,
    hashes,
)
from tests.model.world import NOBODY, SCRAP, replaced


class NodeSide:
    """The moves of both nodes. Every method gives a new world."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._mutation = config.mutation
        self._fetches = FetchRules(config)

    # ---- what can happen -----------------------------------------------------------------------

    def progress(self, world: World) -> Iterator[Move]:
        """What goes on by itself."""
        for node in NODES:
            here = world.nodes[node]
            if not here.is_up:
                continue
            is_stepping = any(leg.is_stepping for leg in here.legs)
            for leg in here.legs:
                name = f"attempt {leg.attempt} on {node}"
                if leg.is_stepping:
                    yield f"a step of {name} ends", partial(self._end_step, world, node, leg)
                elif not is_stepping and not self._is_fetching(world, node, leg):
                    yield f"a step of {name} begins", partial(self._begin_step, world, node, leg)
            yield from self._fetches.progress(world, node)
            if here.is_cut:
                yield f"{node} sees that it was cut off", partial(self._notice, world, node)
            if world.to_nodes[node]:
                yield f"{node} hears of the coordinator", partial(self._hear, world, node)

    def hazards(self, world: World) -> Iterator[Move]:
        """What may happen, or not."""
        for node in NODES:
            here = world.nodes[node]
            if not here.is_up:
                continue
            yield from self._fetches.hazards(world, node)
            if here.pool.cached:
                yield f"others come and go on {node}", partial(self._come_and_go, world, node)
            if world.budget.crashes:
                yield f"{node} crashes", partial(self._crash, world, node)
            head = world.to_nodes[node][:1]
            if world.budget.refusals and head and head[0].kind in (Kind.LEG, Kind.TAKE):
                yield f"{node} refuses", partial(self._refuse, world, node)

    # ---- what it is told -----------------------------------------------------------------------

    def _hear(self, world: World, node: int) -> World:
        message, *left = world.to_nodes[node]
        world = world._replace(to_nodes=replaced(world.to_nodes, node, tuple(left)))
        if message.kind is Kind.CANCEL:
            return self._cancel(world, node, message.attempt)
        here = world.nodes[node]
        if message.kind is Kind.LEG:
            if any(leg.attempt == message.attempt for leg in here.legs):
                return world.tell_coordinator(Message(Kind.FAILED, message.attempt, node))
            world = world.with_node(node, legs=(*here.legs, Leg(message.attempt, message.number)))
        elif message.kind is Kind.PREFETCH:  # of one asked for before, nobody will hear
            world = self._fetches.cancel(world, node, message.attempt, only_prefetch=True)
        here = world.nodes[node]
        fetch = Fetch(
            message.attempt,
            message.kind is Kind.PREFETCH,
            _num_reusable(message.number),
            message.node,
            takes=message.takes,
        )
        return world.with_node(node, fetches=(*here.fetches, fetch))

    def _refuse(self, world: World, node: int) -> World:
        message, *left = world.to_nodes[node]
        budget = world.budget._replace(refusals=world.budget.refusals - 1)
        world = world._replace(to_nodes=replaced(world.to_nodes, node, tuple(left)), budget=budget)
        return world.tell_coordinator(Message(Kind.FAILED, message.attempt, node))

    def _cancel(self, world: World, node: int, attempt: int) -> World:
        world = self._fetches.cancel(world, node, attempt)
        world = self._fetches.keep_no_stream(world, node, attempt)
        for leg in world.nodes[node].legs:
            if leg.attempt != attempt:
                continue
            if leg.is_stepping:  # its blocks are freed when the step has ended
                world = world.with_leg(node, leg._replace(is_cancelled=True))
                if self._mutation is Mutation.FREED_IN_STEP:
                    world = self._release(world, node, leg)
            else:
                world = self._release(world.without_leg(node, leg), node, leg)
        return world

    def _notice(self, world: World, node: int) -> World:
        """The link is gone; there will be another one."""
        if self._mutation is not Mutation.CUT_UNNOTICED:
            for leg in world.nodes[node].legs:
                world = self._cancel(world, node, leg.attempt)
            for fetch in world.nodes[node].fetches:  # and of those who were about to come
                if fetch.takes != NOBODY:
                    world = self._cancel(world, node, fetch.attempt)
        return world.with_node(node, is_cut=False)

    # ---- the engine ----------------------------------------------------------------------------

    def _is_fetching(self, world: World, node: int, leg: Leg) -> bool:
        fetches = world.nodes[node].fetches
        return any(f.attempt == leg.attempt and not f.is_prefetch for f in fetches)

    def _begin_step(self, world: World, node: int, leg: Leg) -> World | None:
        """Compute all that has no KV yet; None: there are no blocks for it."""
        end = NUM_PROMPT + leg.num_output
        num_missing = -(-end // BLOCK_TOKENS) - len(leg.table)
        cached = () if leg.table else hashes(_num_reusable(leg.num_output))
        if num_missing:
            reserved = pools.reserve(world.nodes[node].pool, num_missing, cached)
            if reserved is None:
                return None
            outcome, blocks, num_reused = reserved
            world = world.with_pool(node, outcome, self._config)
            computed = leg.num_computed or num_reused * BLOCK_TOKENS
            leg = leg._replace(table=leg.table + blocks, num_computed=computed)
        world = world.with_leg(node, leg._replace(is_stepping=True))
        world = world.write(node, leg.table, leg.num_computed, end, is_done=False)
        if self._mutation is Mutation.HALF_BLOCK:
            world = self._publish(world, node, leg, end)
        return world

    def _end_step(self, world: World, node: int, leg: Leg) -> World:
        end = NUM_PROMPT + leg.num_output
        world = world.write(node, leg.table, leg.num_computed, end, is_done=True)
        if leg.is_cancelled:
            world = world.without_leg(node, leg)
            is_freed = self._mutation is Mutation.FREED_IN_STEP
            return world if is_freed else self._release(world, node, leg)
        world = self._publish(world, node, leg, end)
        is_done = leg.num_output + 1 == NUM_OUTPUT
        is_last = leg.is_leaving and not is_done and self._mutation is not Mutation.END_UNTOLD
        token = Message(Kind.TOKEN, leg.attempt, node, leg.num_output, is_last=is_last)
        world = world.tell_coordinator(token)
        leg = leg._replace(num_output=leg.num_output + 1, num_computed=end, is_stepping=False)
        if is_done:
            world = self._fetches.keep_no_stream(world, node, leg.attempt)
        elif leg.is_leaving:
            world = self._fetches.hand_off(world, node, leg, leg.num_output)
        else:
            return world.with_leg(node, leg)
        return self._release(world.without_leg(node, leg), node, leg)

    def _publish(self, world: World, node: int, leg: Leg, end: int) -> World:
        for index in range(leg.num_computed // BLOCK_TOKENS, end // BLOCK_TOKENS):
            (block_hash,) = hashes(index + 1)[index:]
            outcome = pools.publish(world.nodes[node].pool, leg.table[index], block_hash)
            world = world.with_pool(node, outcome, self._config)
        return world

    def _release(self, world: World, node: int, leg: Leg) -> World:
        if not leg.table:
            return world
        outcome = pools.release(world.nodes[node].pool, leg.table)
        return world.with_pool(node, outcome, self._config)

    # ---- others, and lives ---------------------------------------------------------------------

    def _come_and_go(self, world: World, node: int) -> World:
        """Other requests take every free block, cached ones too, and write to it."""
        free = (*world.nodes[node].pool.uncached, *world.nodes[node].pool.cached)
        cells = world.nodes[node].cells
        for block_id in free:
            cells = replaced(cells, block_id, (SCRAP,) * BLOCK_TOKENS)
        outcome = pools.take_all(world.nodes[node].pool)
        return world.with_pool(node, outcome, self._config).with_node(node, cells=cells)

    def _crash(self, world: World, node: int) -> World:
        """What it has said may still arrive at the coordinator."""
        budget = world.budget._replace(crashes=world.budget.crashes - 1)
        return world._replace(
            nodes=replaced(world.nodes, node, blank_node(is_up=False)),
            to_nodes=replaced(world.to_nodes, node, ()),
            budget=budget,
        )


def _num_reusable(num_output: int) -> int:
    """Full blocks of what has been emitted; at least one token must be computed to have logits."""
    return (NUM_PROMPT + num_output - 1) // BLOCK_TOKENS
