"""Whom a node tells its metrics: those who may read the state of the cluster at its coordinator.

Nodes know no keys. So they ask, with the hash of what is shown, and remember for a while who may.
As long as no coordinator answers, those still may: they are looking for the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import grpc.aio

from pdserve.node.coordinator_link import CoordinatorLink
from pdserve.settings.access import hash_key
from pdserve.settings.timeouts import NodeTimeouts
from pdserve.shared.clock import Clock
from pdserve.shared.errors import ConfigError
from pdserve.wire.channel import open_channel
from pdserve.wire.coordinator_pb2 import Reader
from pdserve.wire.coordinator_pb2_grpc import ReadersStub
from pdserve.wire.security import Security

KEPT_S: Final = 15.0
_MOST: Final = 1024  # readers

Ask: TypeAlias = Callable[[str], Awaitable[bool | None]]  # None: nobody answers


class Readers:
    """Those of one node. One question at a time: strangers may try as much as they like."""

    def __init__(self, ask: Ask, clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._known: dict[str, float] = {}  # hash of one who may |-> until when it is not asked for
        self._turn = asyncio.Lock()

    async def may_read(self, shown: str | None) -> bool:
        """Return whether who shows this key or token may read; None: who shows none."""
        key_hash = "" if shown is None else hash_key(shown)
        if self._is_fresh(key_hash):
            return True
        async with self._turn:
            if self._is_fresh(key_hash):  # by now
                return True
            answer = await self._ask(key_hash)
        if answer is None:
            return key_hash in self._known
        self._known.pop(key_hash, None)
        if answer:
            self._known[key_hash] = self._clock.now() + KEPT_S
            if len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
        return answer

    def _is_fresh(self, key_hash: str) -> bool:
        return self._known.get(key_hash, 0.0) > self._clock.now()


def readers_of(
    links: Sequence[CoordinatorLink], timeouts: NodeTimeouts, security: Security, clock: Clock
) -> Callable[[str | None], Awaitable[bool]]:
    """Return a node's `may_read`, which asks the first coordinator of its links that answers."""

    async def ask(key_hash: str) -> bool | None:
        for link in list(links):
            if link.is_attached and (told := await _ask(link.address, key_hash)) is not None:
                return told
        return None

    async def _ask(address: str, key_hash: str) -> bool | None:
        try:
            async with open_channel(
                address, timeouts.liveness_s, security, "coordinator"
            ) as channel:
                reading = await ReadersStub(channel).MayRead(
                    Reader(key_hash=key_hash),
                    timeout=timeouts.connect_s,
                    metadata=security.metadata,
                )
        except ConfigError:  # its certificate cannot be read now
            return None
        except grpc.aio.AioRpcError as error:
            # It is older than the question, and closes nothing.
            return True if error.code() is grpc.StatusCode.UNIMPLEMENTED else None
        return bool(reading.may_read)

    return Readers(ask, clock).may_read
