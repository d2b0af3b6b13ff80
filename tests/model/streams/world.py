"""One stream, two nodes and their coordinator, in a state that can be hashed.

A cell is one token's place in a block: it holds the KV of the token at `position` as
`position + 1`, or SCRAP. The prompt fills the first block. A step computes all tokens that have no
KV yet, and samples the next one. Generations are kept relative to the block's present one, which
is 0 then: a ticket's entry is 0 while it is good, and -1 once it is stale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Any, NamedTuple, TypeAlias

from tests.model.pools import Outcome, PoolState, new_pool
from tests.model.world import NOBODY, SCRAP, Cells, replaced

NUM_BLOCKS = 3  # of each node's pool
BLOCK_TOKENS = 2
NUM_PROMPT = 2  # tokens
NUM_OUTPUT = 3
NODES = (0, 1)


class Mutation(Enum):
    """A protocol that is wrong in one place. The search must find each of them."""

    SAME_ATTEMPT = auto()  # a stream that goes on has the id of its former attempt
    ANY_ATTEMPT = auto()  # tokens are taken whatever attempt they belong to
    SHOWN_AS_THEY_COME = auto()  # tokens are not ordered by their index
    RESUMED_AFTER_GAP = auto()  # those that came early count as shown
    NO_BUMP = auto()  # freed blocks keep their generation
    COMPARE_FIRST = auto()  # generations are looked at before the copy
    HALF_BLOCK = auto()  # the last block is offered before the end of the step that fills it
    FREED_IN_STEP = auto()  # a cancelled stream's blocks are freed while its step runs
    NO_LEASE = auto()  # nobody minds blocks that are held for a node that is gone
    SOURCE_GOES_ON = auto()  # a stream that moves is not taken from its source
    BACK_TO_SOURCE = auto()  # after a refusal the source is believed to go on
    LOST_IF_REFUSED = auto()  # the record is dropped when it is sent, not when it is taken
    CUT_UNNOTICED = auto()  # a node that lost its coordinator goes on with its streams
    LATE_PREFETCHED = auto()  # a move is carried on though its source is gone
    TAKEN_IN_STEP = auto()  # a stream's rest is handed off before the end of its last step there
    END_UNTOLD = auto()  # the source does not say that its leg has ended
    END_UNHEEDED = auto()  # nor is it heeded if nobody takes the stream over any more
    USED_AGAIN = auto()  # a leg has the id of one that was to take the stream over, and did not


@dataclass(frozen=True)
class Config:
    """A world small enough to be searched: how often each thing may happen."""

    name: str
    crashes: int = 0
    cuts: int = 0  # a node is taken for lost, and lives
    moves: int = 0  # with a prefetch
    takeovers: int = 0
    refusals: int = 0
    cancels: bool = False  # the user may give up at any time
    in_order: bool = False  # tokens arrive as they were sent
    mutation: Mutation | None = None


class Kind(IntEnum):
    """Of a message."""

    LEG = 1  # to a node
    PREFETCH = 2
    CANCEL = 3
    TOKEN = 4  # to the coordinator
    FAILED = 5
    PREFETCHED = 6
    TAKE = 7  # to a node


class Message(NamedTuple):
    kind: Kind
    attempt: int
    node: int = NOBODY  # to the coordinator: who says it; to a node: who has the KV
    number: int = 0  # output tokens so far; TOKEN: its index
    takes: int = NOBODY  # TAKE: the attempt that runs there
    is_last: bool = False  # TOKEN: the leg ends with it, and its stream goes on elsewhere


class Leg(NamedTuple):
    """An attempt at the stream on one node."""

    attempt: int
    num_output: int
    table: tuple[int, ...] = ()
    num_computed: int = 0
    is_stepping: bool = False
    is_cancelled: bool = False  # while it steps
    is_leaving: bool = False  # it ends here with its next token


class Fetch(NamedTuple):
    """KV that is pulled from the other node, for a leg or for one that may come.

    One that takes a stream over pulls twice: what is complete while the stream runs, then the rest.
    """

    attempt: int
    is_prefetch: bool
    num_blocks: int  # that are wanted
    source: int
    is_begun: bool = False
    blocks: tuple[int, ...] = ()  # referenced: from the cache, then destinations
    num_here: int = 0  # of them, from the cache
    sources: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()  # their generations
    num_copied: int = 0
    is_compared: bool = False
    takes: int = NOBODY  # attempt that runs at the source
    has_asked: bool = False  # it to end there
    num_output: int = 0  # when it had ended; 0: it has not


class Hold(NamedTuple):
    """Blocks that a node keeps for the other one."""

    attempt: int
    is_prefetch: bool
    blocks: tuple[int, ...]
    takes: int = NOBODY  # attempt here whose stream is taken over
    num_output: int = 0  # when it had ended here; 0: it has not


class Node(NamedTuple):
    is_up: bool
    is_cut: bool  # taken for lost by the coordinator, and has not noticed
    pool: PoolState
    cells: Cells  # [block][token]
    generations: tuple[int, ...]
    legs: tuple[Leg, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    holds: tuple[Hold, ...] = ()


class Status(IntEnum):
    """Of the stream, for its client."""

    LIVE = auto()
    DONE = auto()
    CANCELLED = auto()


class Further(IntEnum):
    """What is done at the stream's next token (`RunningRequest.on_further`)."""

    NOTHING = auto()
    GOES_ON = auto()  # it is no longer interrupted
    CARRY_OUT = auto()  # it moves


class Moving(NamedTuple):
    """The stream is about to move."""

    source_attempt: int
    target: int
    attempt: int  # to come


class Coordinator(NamedTuple):
    status: Status = Status.LIVE
    shown: int = 0  # output tokens, as it believes
    num_seen: int = 0  # by the client
    early: tuple[int, ...] = ()  # indices, ascending
    attempt: int = 0
    owner: int = NOBODY
    members: tuple[bool, ...] = (True, True)
    num_attempts: int = 0  # that have an id
    move: Moving | None = None
    successor: Moving | None = None  # who is to take the stream over
    further: Further = Further.NOTHING
    is_interrupted: bool = False  # and has no further token yet


class Budget(NamedTuple):
    """How often each thing may still happen."""

    crashes: int
    cuts: int
    moves: int
    takeovers: int
    refusals: int


Letters: TypeAlias = tuple[Message, ...]


class World(NamedTuple):
    coordinator: Coordinator
    nodes: tuple[Node, ...]
    to_nodes: tuple[Letters, ...]  # each in order
    to_coordinator: Letters
    budget: Budget

    def with_coordinator(self, **changes: Any) -> World:
        return self._replace(coordinator=self.coordinator._replace(**changes))

    def with_node(self, node: int, **changes: Any) -> World:
        changed = self.nodes[node]._replace(**changes)
        return self._replace(nodes=replaced(self.nodes, node, changed))

    def with_leg(self, node: int, leg: Leg) -> World:
        legs = tuple(leg if each.attempt == leg.attempt else each for each in self.nodes[node].legs)
        return self.with_node(node, legs=legs)

    def without_leg(self, node: int, leg: Leg) -> World:
        legs = tuple(each for each in self.nodes[node].legs if each.attempt != leg.attempt)
        return self.with_node(node, legs=legs)

    def with_pool(self, node: int, outcome: Outcome, config: Config) -> World:
        """After a verb of the pool; generations are bumped when blocks are freed."""
        generations = list(self.nodes[node].generations)
        if config.mutation is not Mutation.NO_BUMP:
            for block_id in outcome.bumped:
                generations[block_id] += 1
        return self.with_node(node, pool=outcome.state, generations=tuple(generations))

    def write(
        self, node: int, table: Sequence[int], first: int, end: int, *, is_done: bool
    ) -> World:
        """KV of the tokens at these positions; a running step leaves anything."""
        cells = [list(row) for row in self.nodes[node].cells]
        for position in range(first, end):
            index, place = divmod(position, BLOCK_TOKENS)
            cells[table[index]][place] = position + 1 if is_done else SCRAP
        return self.with_node(node, cells=tuple(map(tuple, cells)))

    def tell_node(self, node: int, message: Message) -> World:
        """Over a link, if there is one."""
        if not self.coordinator.members[node] or not self.nodes[node].is_up:
            return self
        letters = (*self.to_nodes[node], message)
        return self._replace(to_nodes=replaced(self.to_nodes, node, letters))

    def tell_coordinator(self, message: Message) -> World:
        return self._replace(to_coordinator=(*self.to_coordinator, message))

    @property
    def is_free(self) -> bool:
        """Whether the stream is over, and nobody holds a block or is about to."""
        return self.coordinator.status is not Status.LIVE and all(
            node.pool.num_referenced == 0 and not (node.legs or node.fetches or node.holds)
            for node in self.nodes
        )


# What happens, and how to get the world after it; None: it cannot happen now.
Move: TypeAlias = tuple[str, Callable[[], World | None]]


def hashes(num_blocks: int) -> tuple[bytes, ...]:
    """Of the stream's first blocks."""
    return tuple(bytes([index + 1]) for index in range(num_blocks))


def contents(index: int) -> tuple[int, ...]:
    """What the stream's block `index` holds when it is full."""
    return tuple(index * BLOCK_TOKENS + place + 1 for place in range(BLOCK_TOKENS))


def blank_node(*, is_up: bool) -> Node:
    cells = ((SCRAP,) * BLOCK_TOKENS,) * NUM_BLOCKS
    return Node(is_up, False, new_pool(NUM_BLOCKS), cells, (0,) * NUM_BLOCKS)


def first_world(config: Config) -> World:
    """The stream has been sent to the first node: they are alike."""
    world = World(
        Coordinator(owner=0),
        (blank_node(is_up=True),) * len(NODES),
        ((),) * len(NODES),
        (),
        Budget(config.crashes, config.cuts, config.moves, config.takeovers, config.refusals),
    )
    return world.tell_node(0, Message(Kind.LEG, 0))
