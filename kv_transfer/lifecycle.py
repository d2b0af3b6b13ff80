"""The life of a KV block during a handoff, as two small state machines with their legal moves.

The exporter's block, as one holder of it sees it. A holder is a handoff, or the answer to a prefix
query; a block that several requests share has a life of its own with each of them:

             announce part, renew   renew
                      ┌──┐           ┌──┐
                      │  ▼           │  ▼
    FREE ──hold──► WRITING ──announce──► ANNOUNCED
      ▲                │                     │
      └────────────────┴──────release────────┘

The puller's block, as the intake of one request sees it:

    FREE ──reserve──► RESERVED ────pull────► PULLING ──validate──► VALID ──adopt──► ADOPTED
                          ▲                  │ ▲  │
                          └──validate part───┘ │  └──fail──► DOUBTFUL
                                               └─────pull───────┘
    FREE ──reuse──► VALID
    RESERVED, DOUBTFUL ──adopt blank──► ADOPTED
    RESERVED, VALID, DOUBTFUL ──release──► FREE

What is *not* there says the most. There is no way out of PULLING but the end of the read, so a
block goes back to its pool only when nothing can write to it any more. No pull begins on a VALID
block, which other requests may be reading. Only a VALID block is adopted to be read; the engine may
have any other one to write to. And ADOPTED is for good: who gives it back twice has a bug.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Generic, TypeVar


class ExporterState(StrEnum):
    """What an exporter's block is to one holder."""

    FREE = "free"  # nothing: this holder has no reference to it
    WRITING = "writing"  # held, and some layers or tokens may not have been computed yet
    ANNOUNCED = "announced"  # held, complete, and all of it named by tickets


class ExporterMove(StrEnum):
    """What a holder does with an exporter's block."""

    HOLD = "hold"  # take a reference
    ANNOUNCE_PART = "announce part"  # issue a ticket for what has been computed, not for the rest
    ANNOUNCE = "announce"  # issue a ticket for (the rest of) it
    RENEW = "renew"  # issue the same tickets again, because the first ones expire
    RELEASE = "release"  # drop the reference: settled, ended or expired


class PullerState(StrEnum):
    """What a puller's block is to the intake of one request."""

    FREE = "free"  # nothing: this intake has no reference to it
    RESERVED = "reserved"  # ours; nothing writes to it; not everything has arrived
    PULLING = "pulling"  # a read, or several at once, may be writing to it
    VALID = "valid"  # complete and validated; perhaps shared; nothing writes to it
    DOUBTFUL = "doubtful"  # a read has ended without validating: it holds anything
    ADOPTED = "adopted"  # the engine's, and none of the intake's business any more


class PullerMove(StrEnum):
    """What an intake does with a block of its own pool."""

    RESERVE = "reserve"  # allocate it
    REUSE = "reuse"  # take it from the prefix cache, with its contents
    PULL = "pull"  # begin to read into it
    VALIDATE_PART = "validate part"  # every read has ended well, and more is to come
    VALIDATE = "validate"  # every read has ended well, and nothing is missing
    FAIL = "fail"  # every read has ended, not all of them well; cancelled ones included
    ADOPT = "adopt"  # give it to the engine to be read
    ADOPT_BLANK = "adopt blank"  # give it to the engine to be written first
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
class Machine(Generic[StateT, MoveT]):
    """One kind of block life."""

    name: str  # whose blocks, for errors
    moves: Mapping[tuple[StateT, MoveT], StateT]
    free: StateT  # of every block that has not moved yet
    ends: frozenset[StateT]  # where a block may be left for good


EXPORTER = Machine("exporter", EXPORTER_MOVES, ExporterState.FREE, frozenset({ExporterState.FREE}))
PULLER = Machine(
    "puller", PULLER_MOVES, PullerState.FREE, frozenset({PullerState.FREE, PullerState.ADOPTED})
)


class IllegalMove(AssertionError):
    """A block was about to make a move that its state does not allow: a bug of this process.

    No PdserveError, because those are expected, caught and answered; this one must be seen.
    """


class BlockStates(Generic[StateT, MoveT]):
    """The states of one owner's blocks: a handoff's, or an intake's.

    A move takes a few set operations however many blocks make it, since a handoff moves hundreds.
    """

    __slots__ = ("_blocks", "_machine", "_owner")

    def __init__(self, machine: Machine[StateT, MoveT], owner: str) -> None:
        """`owner` is named in errors: the request id, say."""
        self._machine = machine
        self._owner = owner
        self._blocks: dict[StateT, set[int]] = {}  # without the free ones

    def move(self, block_ids: Sequence[int], move: MoveT) -> None:
        """All of these blocks make this move, whatever states they are in.

        Raises:
            IllegalMove: one of them must not, or is named twice; then none has moved.
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
        """Of one block."""
        for state, blocks in self._blocks.items():
            if block_id in blocks:
                return state
        return self._machine.free

    def check_ended(self) -> None:
        """Assert that no block is on its way any more.

        Raises:
            AssertionError: names those that are.
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
