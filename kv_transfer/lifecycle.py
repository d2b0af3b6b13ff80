"""A handoff's KV: which parts have been announced or pulled, and the life of each of its blocks.

A block's life is one of two small state machines with their legal moves.

An exporter's block, from the view of one holder: a handoff, or the answer to a prefix query. A
block that is shared by several requests has one state per holder:

             announce part, renew   renew
                      ┌──┐           ┌──┐
                      │  ▼           │  ▼
    FREE ──hold──► WRITING ──announce──► ANNOUNCED
      ▲                │                     │
      └────────────────┴──────release────────┘

A puller's block, from the view of one request's intake:

    FREE ──reserve──► RESERVED ────pull────► PULLING ──validate──► VALID ──adopt──► ADOPTED
                          ▲                  │ ▲  │
                          └──validate part───┘ │  └──fail──► DOUBTFUL
                                               └─────pull───────┘
    FREE ──reuse──► VALID
    RESERVED, DOUBTFUL ──adopt blank──► ADOPTED
    RESERVED, VALID, DOUBTFUL ──release──► FREE

The missing moves are the important ones. PULLING is left only when the read has ended, so a block
is returned to its pool only when nothing can write to it any more. No pull starts on a VALID block,
which other requests may be reading. Only a VALID block is adopted for reading; the engine may adopt
any other one for writing. ADOPTED is final: releasing such a block again would be a bug.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Generic, TypeVar

from pdserve.shared.errors import MalformedMessage


@dataclass(frozen=True, slots=True)
class KvPart:
    """Tokens [first_token, end_token) in layers [first_layer, end_layer)."""

    first_token: int
    end_token: int
    first_layer: int
    end_layer: int

    @property
    def layers(self) -> range:
        """The layers as a range."""
        return range(self.first_layer, self.end_layer)

    def pieces(self, max_tokens: int) -> list[KvPart]:
        """The same KV in parts of at most so many tokens."""
        begins = range(self.first_token, self.end_token, max_tokens)
        ends = [*begins[1:], self.end_token]
        return [
            replace(self, first_token=begin, end_token=end)
            for begin, end in zip(begins, ends, strict=True)
        ]


class Progress:
    """The parts so far, each of which begins where the one before it ended.

    layers
      ▲ ┌────────┬────────┬ ─ ─ ─ ─┐       KV comes chunk by chunk of tokens, and within a chunk
      │ │        │        │        │       by ascending ranges of layers. So two numbers suffice:
      │ │ chunk  │ chunk  ├────────┤       the tokens that are complete, and the number of layers
      │ │        │        │////////│       of the next chunk.
      └─┴────────┴────────┴────────┴──► tokens
                      num_tokens   chunk_end
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.num_tokens = 0  # complete, in all layers
        self._chunk_end = 0  # tokens [num_tokens, _chunk_end) are there in the first
        self._chunk_layers = 0  # layers, that is this many; 0: there is no such chunk

    def take(self, part: KvPart) -> None:
        """Add the next part.

        Raises:
            MalformedMessage: it does not begin where the one before it ended.
        """
        fits = (part.first_token, part.first_layer) == (self.num_tokens, self._chunk_layers)
        is_whole = part.end_layer == self._num_layers
        if self._chunk_layers:  # the rest of a chunk comes whole, or shorter if a step was repeated
            is_chunk = part.end_token == self._chunk_end
            fits &= is_chunk or (is_whole and part.end_token < self._chunk_end)
        if not fits:
            raise MalformedMessage(
                f"after {self.num_tokens} tokens and {self._chunk_layers} layers of those up to "
                f"{self._chunk_end} came KV of tokens {part.first_token}..{part.end_token}, "
                f"layers {part.first_layer}..{part.end_layer}"
            )
        if not is_whole:
            self._chunk_end, self._chunk_layers = part.end_token, part.end_layer
            return
        self.num_tokens = part.end_token
        if self.num_tokens >= self._chunk_end:
            self._chunk_layers = 0

    def until(self, end_token: int, num_layers: int) -> list[KvPart]:
        """The parts that are missing of tokens [0, end_token) in the first `num_layers` layers.

        They are in order; `take` each of them. If the current chunk was begun with another end, its
        remaining layers can only come all at once, so with fewer layers there is no part.
        """
        is_whole = num_layers == self._num_layers
        if self._chunk_layers and not is_whole and end_token != self._chunk_end:
            return []
        parts = []
        begin = self.num_tokens
        if self._chunk_layers:
            end = min(end_token, self._chunk_end)
            parts.append(KvPart(begin, end, self._chunk_layers, num_layers))
            begin = end
        parts.append(KvPart(begin, end_token, 0, num_layers))
        return [p for p in parts if p.first_token < p.end_token and p.first_layer < p.end_layer]

    def whole(self) -> list[KvPart]:
        """Everything so far, in as few parts as possible."""
        parts = [
            KvPart(0, self.num_tokens, 0, self._num_layers),
            KvPart(self.num_tokens, self._chunk_end, 0, self._chunk_layers),
        ]
        return [p for p in parts if p.first_token < p.end_token and p.first_layer < p.end_layer]


class ExporterState(StrEnum):
    """The state of an exporter's block for one holder."""

    FREE = "free"  # this holder has no reference to it
    WRITING = "writing"  # held; some layers or tokens may not be computed yet
    ANNOUNCED = "announced"  # held, complete, and covered by tickets


class ExporterMove(StrEnum):
    """What a holder does with an exporter's block."""

    HOLD = "hold"  # take a reference
    ANNOUNCE_PART = "announce part"  # issue a ticket for the part that has been computed
    ANNOUNCE = "announce"  # issue a ticket for all of it, or for the rest
    RENEW = "renew"  # issue tickets again, because the first ones expire
    RELEASE = "release"  # drop the reference: settled, ended or expired


class PullerState(StrEnum):
    """The state of a puller's block for the intake of one request."""

    FREE = "free"  # this intake has no reference to it
    RESERVED = "reserved"  # allocated, and incomplete; nothing writes to it
    PULLING = "pulling"  # one or several reads may be writing to it
    VALID = "valid"  # complete and validated, possibly shared; nothing writes to it
    DOUBTFUL = "doubtful"  # a read has failed: the content is undefined
    ADOPTED = "adopted"  # owned by the engine


class PullerMove(StrEnum):
    """What an intake does with a block of its own pool."""

    RESERVE = "reserve"  # allocate it
    REUSE = "reuse"  # take it from the prefix cache, with its contents
    PULL = "pull"  # begin to read into it
    VALIDATE_PART = "validate part"  # all reads have succeeded; more will follow
    VALIDATE = "validate"  # all reads have succeeded; the block is complete
    FAIL = "fail"  # all reads have ended, and at least one failed or was cancelled
    ADOPT = "adopt"  # give it to the engine, for reading
    ADOPT_BLANK = "adopt blank"  # give it to the engine, which has to write it first
    RELEASE = "release"  # drop the reference


EXPORTER_MOVES: Mapping[tuple[ExporterState, ExporterMove], ExporterState] = {
    (ExporterState.FREE, ExporterMove.HOLD): ExporterState.WRITING,
    (ExporterState.WRITING, ExporterMove.ANNOUNCE_PART): ExporterState.WRITING,
    (ExporterState.WRITING, ExporterMove.RENEW): ExporterState.WRITING,
    (ExporterState.WRITING, ExporterMove.ANNOUNCE): ExporterState.ANNOUNCED,
    (ExporterState.ANNOUNCED, ExporterMove.RENEW): ExporterState.ANNOUNCED,
    (ExporterState.WRITING, ExporterMove.RELEASE): ExporterState.FREE,
    (ExporterState.ANNOUNCED, ExporterMove.RELEASE): ExporterState.FREE,
}

PULLER_MOVES: Mapping[tuple[PullerState, PullerMove], PullerState] = {
    (PullerState.FREE, PullerMove.RESERVE): PullerState.RESERVED,
    (PullerState.FREE, PullerMove.REUSE): PullerState.VALID,
    (PullerState.RESERVED, PullerMove.PULL): PullerState.PULLING,
    (PullerState.DOUBTFUL, PullerMove.PULL): PullerState.PULLING,
    (PullerState.PULLING, PullerMove.VALIDATE_PART): PullerState.RESERVED,
    (PullerState.PULLING, PullerMove.VALIDATE): PullerState.VALID,
    (PullerState.PULLING, PullerMove.FAIL): PullerState.DOUBTFUL,
    (PullerState.VALID, PullerMove.ADOPT): PullerState.ADOPTED,
    (PullerState.RESERVED, PullerMove.ADOPT_BLANK): PullerState.ADOPTED,
    (PullerState.DOUBTFUL, PullerMove.ADOPT_BLANK): PullerState.ADOPTED,
    (PullerState.RESERVED, PullerMove.RELEASE): PullerState.FREE,
    (PullerState.VALID, PullerMove.RELEASE): PullerState.FREE,
    (PullerState.DOUBTFUL, PullerMove.RELEASE): PullerState.FREE,
}

StateT = TypeVar("StateT", bound=Enum)
MoveT = TypeVar("MoveT", bound=Enum)


@dataclass(frozen=True, slots=True)
class StateMachine(Generic[StateT, MoveT]):
    """One of the two state machines."""

    name: str  # for errors
    moves: Mapping[tuple[StateT, MoveT], StateT]
    free: StateT  # the initial state of every block
    ends: frozenset[StateT]  # final states


EXPORTER = StateMachine(
    "exporter", EXPORTER_MOVES, ExporterState.FREE, frozenset({ExporterState.FREE})
)
PULLER = StateMachine(
    "puller", PULLER_MOVES, PullerState.FREE, frozenset({PullerState.FREE, PullerState.ADOPTED})
)


class IllegalMove(AssertionError):
    """A move that is not legal in a block's state: a bug in this process.

    Not a PdserveError, since those are expected and handled.
    """


class BlockStates(Generic[StateT, MoveT]):
    """The states of the blocks of one owner: a handoff or an intake.

    A handoff moves hundreds of blocks at a time, so a move takes a few set operations, not one per
    block.
    """

    __slots__ = ("_blocks", "_machine", "_owner")

    def __init__(self, machine: StateMachine[StateT, MoveT], owner: str) -> None:
        """`owner` is named in errors, for example a request id."""
        self._machine = machine
        self._owner = owner
        self._blocks: dict[StateT, set[int]] = {}  # state |-> block ids; free ones are left out

    def move(self, block_ids: Sequence[int], move: MoveT) -> None:
        """Make this move with all of these blocks, which may be in different states.

        Raises:
            IllegalMove: it is illegal for one of them, or one is named twice; then none is moved.
        """
        left = set(block_ids)
        if len(left) != len(block_ids):
            raise IllegalMove(f"{self._owner}: {move.value} names a block twice: {block_ids}")
        leaving: list[tuple[StateT, set[int]]] = []
        for state, blocks in self._blocks.items():
            if moving := blocks & left:
                leaving.append((state, moving))
                left -= moving
        if left:
            leaving.append((self._machine.free, left))
        arriving = [self._target(state, move, moving) for state, moving in leaving]
        for state, moving in leaving:
            if state is not self._machine.free:
                self._blocks[state] -= moving
        for target, (_, moving) in zip(arriving, leaving, strict=True):
            if target is not self._machine.free:
                self._blocks.setdefault(target, set()).update(moving)

    def state_of(self, block_id: int) -> StateT:
        """The state of one block."""
        for state, blocks in self._blocks.items():
            if block_id in blocks:
                return state
        return self._machine.free

    def check_ended(self) -> None:
        """Assert that all blocks are in a final state.

        Raises:
            AssertionError: names those that are not.
        """
        left = {s.value: sorted(b) for s, b in self._blocks.items() if b and not self._is_end(s)}
        assert not left, f"{self._owner} has left {self._machine.name}'s blocks behind: {left}"

    def _is_end(self, state: StateT) -> bool:
        return state in self._machine.ends

    def _target(self, state: StateT, move: MoveT, block_ids: Iterable[int]) -> StateT:
        target = self._machine.moves.get((state, move))
        if target is None:
            legal = [m.value for s, m in self._machine.moves if s is state]
            raise IllegalMove(
                f"{self._owner}: {self._machine.name}'s block {min(block_ids)} is {state.value}, "
                f"so it cannot {move.value}; it could {' or '.join(legal) or 'do nothing'}"
            )
        return target
