"""One exporter and one puller, in a state that can be hashed, and how big and how wrong they are.

Contents are abstract: a cell (one layer of one block) holds the KV that the prompt of `datum` has
there, or SCRAP. Generations are kept relative to the block's present one, which is 0 then: a
ticket's entry is 0 while it is good, and -1 for good once it is stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, TypeVar

from kv_transfer.lifecycle import ExporterState, PullerState
from tests.model.pools import PoolState, new_pool

T = TypeVar("T")

Cells: TypeAlias = tuple[tuple[int, ...], ...]  # [block][layer]

SCRAP = 0
NUM_BLOCKS = 3  # of each pool
NUM_PROMPT_BLOCKS = 2  # of each request: two requests do not fit into a pool together
REQUESTS = (0, 1)
NOBODY = -1


class Violation(AssertionError):
    """Something happened that must never happen; the search adds how it came to it."""


class Mutation(Enum):
    """A protocol that is wrong in one place. The search must find each of them."""

    NO_BUMP = auto()  # freed blocks keep their generation
    BUMP_AFTER_REUSE = auto()  # it changes when the next owner has written
    ONE_BIT_GENERATIONS = auto()  # they come round again
    COMPARE_FIRST = auto()  # generations are looked at before the copy
    FREE_IN_FLIGHT = auto()  # a cancelled pull's blocks are freed before its read has ended
    FORMER_LIVES = auto()  # a ticket of a former life is honoured by the present one
    IDS_AGAIN = auto()  # a request id comes a second time, and old messages with it
    NO_REFERENCE = auto()  # a handoff releases blocks that it has not retained
    PULL_OVER_PREFIX = auto()  # reused prefix blocks are pulled like the others
    NO_LEASE = auto()  # nobody minds handoffs whose puller is gone
    ADOPT_UNREAD = auto()  # a request is adopted with whatever a broken read left


@dataclass(frozen=True)
class Config:
    """A world small enough to be searched."""

    name: str
    chunks: tuple[int, ...] = (2,)  # blocks in each announcement
    num_layers: int = 1  # 2: each chunk is announced layer by layer
    shares_prefix: bool = False  # both prompts have the same first block
    exporter_crashes: int = 0
    puller_crashes: int = 0
    cancels: bool = True  # a user may give up at any time
    duplicates: bool = False  # messages may arrive again and again
    in_order: bool = False  # messages arrive as they were sent
    coordinator: bool = True  # a request that failed on one node is cancelled on the other
    renews: bool = False  # a broken pull is tried again with renewed tickets, once
    recomputes: bool = False  # what could not be pulled is computed by the puller's engine
    num_own_blocks: int = 0  # that a puller's request needs besides its prompt's
    mutation: Mutation | None = None

    @property
    def steps(self) -> tuple[Step, ...]:
        """What is computed and announced at a time."""
        ends = list(accumulate(self.chunks))
        return tuple(
            Step(end - num_blocks, end, layer, layer + 1)
            for num_blocks, end in zip(self.chunks, ends, strict=True)
            for layer in range(self.num_layers)
        )

    def datum(self, request: int, index: int) -> int:
        """What block `index` of the request's prompt must hold, in every layer."""
        is_shared = self.shares_prefix and index == 0
        return 1 + (len(REQUESTS) if is_shared else request) * NUM_PROMPT_BLOCKS + index

    def hashes(self, request: int) -> tuple[bytes, ...]:
        """Of the prompt's blocks; none: nothing is reused in this world."""
        if not self.shares_prefix:
            return ()
        return tuple(bytes([self.datum(request, i)]) for i in range(NUM_PROMPT_BLOCKS))


class Step(NamedTuple):
    first_block: int  # of the prompt
    end_block: int
    first_layer: int
    end_layer: int


class Ticket(NamedTuple):
    request: int
    step: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    life: int  # of the exporter


NO_TICKET = Ticket(NOBODY, 0, (), (), 0)


class Kind(IntEnum):
    """Of a message."""

    SUBSCRIBE = 1
    SETTLE = 2
    RENEW = 3
    TICKET = 4
    ENDED = 5


class Message(NamedTuple):
    kind: Kind
    request: int
    puller_life: int
    exporter_life: int
    attempt: int  # not in the real message: who sent it, for the search to know
    ticket: Ticket = NO_TICKET


class Phase(IntEnum):
    """Of a request on one node."""

    NEW = auto()
    RUNNING = auto()  # exporter: being computed; puller: being pulled
    HELD = auto()  # exporter: left to its handoff; puller: adopted
    OVER = auto()
    FAILED = auto()


class Leg(NamedTuple):
    """A request on the exporter."""

    phase: Phase = Phase.NEW
    table: tuple[int, ...] = ()
    num_reused: int = 0
    num_steps: int = 0  # done
    attempt: int = 0


class Handoff(NamedTuple):
    is_open: bool
    attempt: int
    blocks: tuple[int, ...] = ()
    states: tuple[ExporterState, ...] = ()  # of these
    said: tuple[Ticket, ...] = ()
    subscriber: int = NOBODY  # a life of the puller
    has_lease: bool = False


class Exporter(NamedTuple):
    life: int
    is_up: bool
    pool: PoolState
    legs: tuple[Leg, ...]
    handoffs: tuple[Handoff | None, ...]
    owed_bumps: tuple[int, ...] = ()  # BUMP_AFTER_REUSE


class Memory(NamedTuple):
    """What one life of the exporter exports; it stays as it was when the process dies."""

    cells: Cells
    generations: tuple[int, ...]


class Pull(NamedTuple):
    """A read in flight, one block at a time."""

    ticket: Ticket
    life: int  # whose memory is read
    sources: tuple[int, ...]
    expected: tuple[int, ...]  # their generations
    destinations: tuple[int, ...]
    num_copied: int = 0
    num_compared: int = 0
    is_cancelled: bool = False


class Intake(NamedTuple):
    """A request on the puller."""

    phase: Phase = Phase.NEW
    attempt: int = 0
    source_life: int = 0
    heard: tuple[Ticket, ...] = ()
    table: tuple[int, ...] = ()
    states: tuple[PullerState, ...] = ()  # of these
    num_reused: int = 0
    num_pulled: int = 0  # steps
    pull: Pull | None = None
    has_renewed: bool = False


class Puller(NamedTuple):
    life: int
    is_up: bool
    pool: PoolState
    cells: Cells
    intakes: tuple[Intake, ...]


class World(NamedTuple):
    exporter: Exporter
    puller: Puller
    memories: tuple[Memory, ...]  # one for each life of the exporter so far
    to_exporter: tuple[Message, ...]
    to_puller: tuple[Message, ...]

    def with_exporter(self, **changes: Any) -> World:
        exporter = self.exporter._replace(**changes)
        return World(exporter, self.puller, self.memories, self.to_exporter, self.to_puller)

    def with_leg(self, request: int, leg: Leg) -> World:
        return self.with_exporter(legs=replaced(self.exporter.legs, request, leg))

    def with_handoff(self, request: int, handoff: Handoff | None) -> World:
        return self.with_exporter(handoffs=replaced(self.exporter.handoffs, request, handoff))

    def with_memory(self, memory: Memory) -> World:
        """The exporter's present one."""
        memories = (*self.memories[:-1], memory)
        return World(self.exporter, self.puller, memories, self.to_exporter, self.to_puller)

    def with_puller(self, **changes: Any) -> World:
        puller = self.puller._replace(**changes)
        return World(self.exporter, puller, self.memories, self.to_exporter, self.to_puller)

    def with_intake(self, request: int, intake: Intake) -> World:
        return self.with_puller(intakes=replaced(self.puller.intakes, request, intake))

    def named_blocks(self) -> Iterator[int]:
        """Blocks of the exporter that a ticket names, wherever it is."""
        for handoff in self.exporter.handoffs:
            for ticket in handoff.said if handoff is not None else ():
                yield from ticket.block_ids
        for message in self.to_puller:
            yield from message.ticket.block_ids
        for intake in self.puller.intakes:
            for ticket in intake.heard:
                yield from ticket.block_ids
            if intake.pull is not None:
                yield from intake.pull.sources

    @property
    def is_free(self) -> bool:
        """Whether nobody holds a block, and nobody is about to."""
        return (
            self.exporter.pool.num_referenced == self.puller.pool.num_referenced == 0
            and all(handoff is None for handoff in self.exporter.handoffs)
            and all(intake.phase is not Phase.RUNNING for intake in self.puller.intakes)
        )


# What happens, and how to get the world after it; None: it cannot happen now.
Move: TypeAlias = tuple[str, Callable[[], World | None]]


def blank_cells(config: Config) -> Cells:
    return ((SCRAP,) * config.num_layers,) * NUM_BLOCKS


def blank_memory(config: Config) -> Memory:
    return Memory(blank_cells(config), (0,) * NUM_BLOCKS)


def first_world(config: Config) -> World:
    return World(
        Exporter(0, True, new_pool(NUM_BLOCKS), (Leg(),) * 2, (None,) * 2),
        Puller(0, True, new_pool(NUM_BLOCKS), blank_cells(config), (Intake(),) * 2),
        (blank_memory(config),),
        (),
        (),
    )


def replaced(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def sent(config: Config, messages: tuple[Message, ...], message: Message) -> tuple[Message, ...]:
    """With one more under way. In a bag, where any may come twice, two alike are as one."""
    if not config.in_order and message in messages:
        return messages
    return (*messages, message)
