"""Idempotency keys: a call that is made again under its key is the same call.

Its ids, its seed and the ids of its tool calls are derived from the tenant, the key and the body.
So every coordinator of a cluster derives the same ones, and a client whose coordinator is lost can
go on at another one: with `Last-Event-ID` it says how much of the stream it has already.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType

from pdserve.shared.clock import Clock
from pdserve.shared.errors import IdempotencyKeyInUse, IdempotencyKeyReused, InvalidRequest

KEY_HEADER = "Idempotency-Key"
LAST_EVENT_HEADER = "Last-Event-ID"
MAX_KEY_CHARS = 255
MAX_KEYS = 2**14  # known at a time
KNOWN_S = 600.0  # how long a key is known after its call's end
FORMER_S = 2.0  # how long a client that comes back waits for the end of its former connection
_DRAWN_BYTES = 16
_EVENT_ID = re.compile(
    r"(?:t(?P<lost>(?:[0-9]{1,9}(?:\.[0-9]{1,9}){0,7})?):)?(?P<seen>[0-9]{1,9}(?:-[0-9]{1,9})*)"
)


class KeyedCall:
    """A call that has an idempotency key.

    Args:
        owner: the tenant's name.
        key: the client's.
        path: of the endpoint.
        seen: how many events of each choice the client has, from `Last-Event-ID`; None: not said.
        lost: of a cascade's stream, tokens of each tier that did not answer; None: not said.
        digest: of a call that is made again without its key and body.
    """

    def __init__(
        self,
        owner: str,
        key: str,
        path: str,
        seen: Sequence[int] | None,
        digest: bytes | None = None,
        lost: Sequence[int] | None = None,
    ) -> None:
        self.owner = owner
        self.key = key
        self.seen = seen
        self.lost = lost
        self._digest = digest
        self._hash = blake2b(digest_size=32, person=b"pdserve call")
        for text in (owner, key, path):
            encoded = text.encode()
            self._hash.update(len(encoded).to_bytes(4, "little") + encoded)

    def add(self, part: bytes) -> None:
        """Take in the next part of the body."""
        self._hash.update(part)

    @property
    def digest(self) -> bytes:
        """What tells the call from others, once its body has been taken in."""
        return self._hash.digest() if self._digest is None else self._digest

    @property
    def unique(self) -> str:
        """The string from which the call's ids are made."""
        return f"{self.draw('unique'):0{2 * _DRAWN_BYTES}x}"

    def draw(self, *what: str | int) -> int:
        """Return a number of 128 bits for a purpose; the same whenever the call is made."""
        purpose = "/".join(map(str, what)).encode()
        drawn = blake2b(purpose, digest_size=_DRAWN_BYTES, key=self.digest)
        return int.from_bytes(drawn.digest(), "little")


def draw(call: KeyedCall | None, *what: str | int) -> int:
    """Return 128 bits for a purpose: always the same under a key, else at random."""
    return secrets.randbits(8 * _DRAWN_BYTES) if call is None else call.draw(*what)


def keyed_call(headers: Mapping[str, str], owner: str, path: str) -> KeyedCall | None:
    """Return the keyed call that a request's headers begin; None without a key.

    Raises InvalidRequest.
    """
    key = headers.get(KEY_HEADER)
    if key is None:
        return None
    if not (0 < len(key) <= MAX_KEY_CHARS and key.isprintable()):
        raise InvalidRequest(
            f"{KEY_HEADER!r} must have 1 to {MAX_KEY_CHARS} printable characters", KEY_HEADER
        )
    last = headers.get(LAST_EVENT_HEADER)
    if last is None:
        return KeyedCall(owner, key, path, None)
    found = _EVENT_ID.fullmatch(last)
    if found is None:
        raise InvalidRequest(
            f"{LAST_EVENT_HEADER!r} is {last[:64]!r}, but must be the id of the last event of this "
            "call that the client has, or 0",
            LAST_EVENT_HEADER,
        )
    seen, lost = found["seen"].split("-"), found["lost"]
    of_tiers = None if lost is None else [int(num) for num in lost.split(".") if num]
    return KeyedCall(owner, key, path, [*map(int, seen)], lost=of_tiers)


@dataclass(slots=True)
class _Known:
    digest: bytes
    running: KeyedCall | None  # None: it has ended
    ended: asyncio.Event
    until_s: float = 0.0


_NOTHING: Mapping[str, _Known] = MappingProxyType({})


class KnownKeys:
    """The keys of calls that run here, or have ended lately; fair between tenants.

    When there are too many, the tenant that has most loses the oldest one whose call has ended.
    """

    def __init__(self, clock: Clock, max_keys: int = MAX_KEYS, former_s: float = FORMER_S) -> None:
        self._clock = clock
        self._max_keys = max_keys
        self._former_s = former_s
        self._by_owner: dict[str, OrderedDict[str, _Known]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    async def begin(self, call: KeyedCall) -> None:
        """Note that a call begins, whose body has been taken in.

        A client that comes back waits until its former connection has ended. Raises
        IdempotencyKeyInUse or IdempotencyKeyReused.
        """
        known = self._find(call)
        if known is not None and known.running is not None and call.seen is not None:
            try:
                async with asyncio.timeout(self._former_s):
                    await known.ended.wait()
            except TimeoutError:
                pass  # refused below
            known = self._find(call)
        if known is not None and known.running is not None:
            raise IdempotencyKeyInUse(
                f"a call with this {KEY_HEADER!r} is still running: wait for its answer, or close "
                f"its connection and come back with {LAST_EVENT_HEADER!r}",
                KEY_HEADER,
            )
        of_owner = self._by_owner.setdefault(call.owner, OrderedDict())
        of_owner[call.key] = _Known(call.digest, call, asyncio.Event())
        of_owner.move_to_end(call.key)
        self._make_room()

    def end(self, call: KeyedCall) -> None:
        """Note that a call has ended; does nothing for one that did not begin."""
        known = self._by_owner.get(call.owner, _NOTHING).get(call.key)
        if known is not None and known.running is call:
            known.running = None
            known.until_s = self._clock.now() + KNOWN_S
            known.ended.set()

    def _find(self, call: KeyedCall) -> _Known | None:
        known = self._by_owner.get(call.owner, _NOTHING).get(call.key)
        if known is None or (known.running is None and known.until_s < self._clock.now()):
            return None
        if known.digest != call.digest:
            raise IdempotencyKeyReused(
                f"this {KEY_HEADER!r} was sent with another request before: use a new one",
                KEY_HEADER,
            )
        return known

    def _make_room(self) -> None:
        """Drop what is too much. Running calls are kept: those are bounded elsewhere."""
        while len(self) > self._max_keys:
            owner = max(self._by_owner, key=lambda name: len(self._by_owner[name]))
            keys = self._by_owner[owner]
            oldest = next((key for key, known in keys.items() if known.running is None), None)
            if oldest is None:
                return
            del keys[oldest]
            if not keys:
                del self._by_owner[owner]
