"""The versions of adapters that a coordinator knows: what names stand for, and stood for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from pdserve.protocol import Prompt
from pdserve.shared.clock import Clock
from pdserve.shared.errors import InvalidRequest

KEPT_S: Final = 1200.0  # how long a call under an idempotency key is known by its version
MAX_CALLS: Final = 1 << 14  # known at a time


@dataclass(frozen=True, slots=True)
class Version:
    """What one name stands for."""

    name: str
    path: str  # of a folder, on each node
    digest: str
    num_bytes: int
    owner: str  # the tenant that has loaded it; empty: nobody in particular
    created: int  # seconds since 1970
    invocation: tuple[int, ...] = ()  # tokens of a prompt from which on it computes; (): it is all

    def adapt(self, prompt: Prompt) -> Prompt:
        """Return a prompt that this computes, from the last invocation on.

        Raises InvalidRequest: it has none.
        """
        begin = last_place(self.invocation, prompt.token_ids)
        if begin is None:
            raise InvalidRequest(
                f"the adapter {self.name!r} begins at its invocation, the tokens "
                f"{[*self.invocation]}, which the prompt does not have",
                "model",
            )
        return structs.replace(prompt, adapter=self.digest, adapted_from=begin)


def last_place(sought: Sequence[int], token_ids: Sequence[int]) -> int | None:
    """Return where these tokens begin for the last time; 0 if they are none, None if nowhere."""
    if not sought:
        return 0
    wanted = list(sought)
    for begin in range(len(token_ids) - len(wanted), -1, -1):
        if token_ids[begin] == wanted[0] and token_ids[begin : begin + len(wanted)] == wanted:
            return begin
    return None


class KnownAdapters:
    """The versions of all names, and those that are needed still though no name stands for them."""

    def __init__(self, clock: Clock, uses: Callable[[str], bool]) -> None:
        """`uses`: whether a request in flight has the adapter of this digest."""
        self._clock = clock
        self._uses = uses
        self._served: dict[str, Version] = {}  # by name
        self._names: dict[str, set[str]] = {}  # that stand for a digest
        self._retired: dict[str, Version] = {}  # by digest
        self._calls: OrderedDict[bytes, tuple[Version, float]] = OrderedDict()  # until when
        self._last_used: dict[str, None] = {}  # digests, the last one last

    def __len__(self) -> int:
        return len(self._served)

    def __iter__(self) -> Iterator[Version]:
        """Iterate over what names stand for."""
        return iter(list(self._served.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._served

    def find(self, name: str, call: bytes | None = None) -> Version | None:
        """Return what a name stands for; None: nothing.

        `call` tells calls under idempotency keys apart: one that is made again gets the version
        that it began with, also if the name stands for another one by now, or for none.
        """
        version = self._served.get(name)
        if call is None:
            return version
        former = self._calls.pop(call, None)
        if former is not None and former[1] > self._clock.now():
            version = former[0]
        if version is not None:
            self._calls[call] = version, self._clock.now() + KEPT_S
            if len(self._calls) > MAX_CALLS:
                self._calls.popitem(last=False)
        return version

    def of_digest(self, digest: str) -> Version | None:
        """Return a version by its digest; None: it is not known, or not any more."""
        for name in self._names.get(digest, ()):
            return self._served[name]
        return self._retired.get(digest)

    def lately_used(self) -> list[Version]:
        """Return all versions that names stand for, the one used last first."""
        ranks = {digest: rank for rank, digest in enumerate(self._last_used)}
        return sorted(self, key=lambda version: ranks.get(version.digest, -1), reverse=True)

    def used(self, digest: str) -> None:
        """Note that a request is for this adapter."""
        self._last_used.pop(digest, None)
        self._last_used[digest] = None

    def serve(self, version: Version) -> None:
        """Have a name stand for this version from now on."""
        self.retire(version.name)
        self._served[version.name] = version
        self._names.setdefault(version.digest, set()).add(version.name)
        self._retired.pop(version.digest, None)
        self.used(version.digest)

    def retire(self, name: str) -> None:
        """Have a name stand for nothing; what runs with its version still needs it."""
        version = self._served.pop(name, None)
        if version is None:
            return
        names = self._names[version.digest]
        names.discard(name)
        if not names:
            del self._names[version.digest]
            self._retired[version.digest] = version

    def take_unneeded(self) -> list[str]:
        """Forget the versions that nothing needs any more; return their digests."""
        if not self._retired:
            return []
        now_s = self._clock.now()
        for call, (_, until_s) in list(self._calls.items()):
            if until_s <= now_s:
                del self._calls[call]
        recalled = {version.digest for version, _ in self._calls.values()}
        over = [d for d in self._retired if d not in recalled and not self._uses(d)]
        for digest in over:
            del self._retired[digest]
            self._last_used.pop(digest, None)
        return over
