"""Which blocks are in the prefix store, and whose those are that this node has computed.

So nobody asks the store whether it has a block. What others wrote since the last survey is not
known; what they removed is missed when it is read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from kv_transfer.store.entry import Key, owner_name


class StoreIndex:
    """Belongs to the event loop."""

    def __init__(self, kind: str, most_owned: int) -> None:
        """Know of KV of this fingerprint, and of so many blocks whose they are."""
        self.kind = kind
        self.reach_s = 0.0  # between the oldest and the newest block, as last seen
        self.marks: dict[str, float] = {}  # owner |-> when it was erased, as last seen
        self._held: dict[bytes, str] = {}  # hash |-> owner, by its name in the store
        self._added: dict[bytes, str] = {}  # likewise, since the survey that is under way began
        self._owned: OrderedDict[bytes, str] = OrderedDict()  # of this node, oldest first
        self._most_owned = most_owned

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._held

    def __len__(self) -> int:
        return len(self._held)

    def key(self, block_hash: bytes) -> Key:
        """Return what a block is called that the store has."""
        return Key(self._held[block_hash], self.kind, block_hash)

    def num_first(self, hashes: Sequence[bytes]) -> int:
        """How many of these the store has, from the first on."""
        return sum(1 for _ in takewhile(self._held.__contains__, hashes))

    def some(self, number: int) -> list[bytes]:
        """Return a few blocks that it has."""
        return [block_hash for _, block_hash in zip(range(number), self._held, strict=False)]

    def add(self, key: Key) -> None:
        """Note that the store has a block."""
        self._held[key.block_hash] = self._added[key.block_hash] = key.owner

    def remove(self, block_hash: bytes) -> None:
        """Note that it does not have it."""
        self._held.pop(block_hash, None)
        self._added.pop(block_hash, None)

    # ---- whose blocks are ----------------------------------------------------------------------

    def own(self, block_hash: bytes, owner: str) -> None:
        """Note whose a block of this node is."""
        self._owned[block_hash] = owner_name(owner)
        self._owned.move_to_end(block_hash)
        if len(self._owned) > self._most_owned:
            self._owned.popitem(last=False)

    def own_key(self, block_hash: bytes) -> Key | None:
        """Return what a block is to be called; None: it is not known, or not known whose it is."""
        owner = self._owned.get(block_hash)
        return None if owner is None else Key(owner, self.kind, block_hash)

    def erased(self, owner: str, mark_s: float | None) -> None:
        """Forget an owner's blocks: what was computed before it was erased is not written again."""
        if mark_s is not None:
            self.marks[owner] = mark_s
        for hashes in (self._owned, self._held, self._added):
            for block_hash in [h for h, whose in hashes.items() if whose == owner]:
                del hashes[block_hash]

    # ---- surveys -------------------------------------------------------------------------------

    def survey_begins(self) -> None:
        """Keep what is added from now on, which the survey may miss."""
        self._added = {}

    def surveyed(self, keys: Iterable[Key], marks: dict[str, float], reach_s: float) -> None:
        """Take over what a survey has found."""
        self.reach_s = reach_s
        for owner, mark_s in marks.items():
            if self.marks.get(owner) != mark_s:
                self.erased(owner, mark_s)
        self._held = {key.block_hash: key.owner for key in keys} | self._added
