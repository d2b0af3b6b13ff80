"""One later host of a node, as what the node does with KV sees it: an agent that it calls."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_transfer.handshake import KvIdentity
from kv_transfer.hosts.conversation import HostConversation
from kv_transfer.hosts.messages import (
    AdmitPuller,
    Answer,
    Begin,
    Bumped,
    Call,
    Cancel,
    Connect,
    Connected,
    Disconnect,
    Dismiss,
    LoadBlocks,
    Pull,
    Pulled,
    Said,
    Serves,
    Store,
)
from kv_transfer.threads import wait_ended
from pdserve.protocol import ExporterWelcome, TransportOffer
from pdserve.shared.clock import Clock
from pdserve.shared.errors import PeerLost, from_code

log = logging.getLogger(__name__)

R = TypeVar("R", bound=msgspec.Struct)

# For a host to answer, beyond what it is given for what it is asked: one that is frozen keeps its
# connections, so there is no other sign.
ANSWER_S: Final = 30.0
_BEGIN_S: Final = 600.0  # likewise, to pin a host tier as large as its memory

_ANSWERS = msgspec.msgpack.Decoder(Answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What a node exports, as an agent has to know it."""

    node_id: str
    incarnation: str
    identity: KvIdentity
    ticket_key: bytes
    transports: Sequence[str]  # as the setting
    kv_port: int  # likewise
    links: Sequence[str]  # likewise, of simulated links


class FarHost:
    """The agent of one host. All methods belong to the event loop's thread."""

    def __init__(self, name: str, block_bytes: int, answer_s: float = ANSWER_S) -> None:
        """There is no connection yet. `block_bytes`: of a block in all parts of that host."""
        self._answer_s = answer_s
        self.name = name
        self.block_bytes = block_bytes
        self.lost = ""  # how it was lost; empty: it was not
        self.num_bumps = 0  # Bumped messages to it; other threads read it
        self._conversation: HostConversation[Answer] | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = count()

    async def begin(
        self,
        sock: socket.socket,
        exported: Exported,
        generations: NDArray[np.uint64],
        tier_blocks: int,
        clock: Clock,
    ) -> list[TransportOffer]:
        """Talk over this connection from now on; returns the offers of the parts there.

        Args:
            sock: connected, and let in.
            exported: by this node.
            generations: uint64[num_blocks], as they are.
            tier_blocks: slots of the host tier.
            clock: of tickets.

        Raises:
            PeerLost: the host is lost.
            PdserveError: it cannot serve its parts.
        """
        self._conversation = HostConversation(sock, _ANSWERS)
        self._hearing = asyncio.create_task(self._hear(self._conversation))
        identity = exported.identity
        serves = await self._ask(
            lambda call: Begin(
                call=call,
                node_id=exported.node_id,
                incarnation=exported.incarnation,
                model_id=identity.model_id,
                revision=identity.revision,
                layout=identity.layout,
                num_stages=identity.num_stages,
                windows=identity.windows,
                ticket_key=exported.ticket_key,
                now_s=clock.now(),
                transports=list(exported.transports),
                kv_port=exported.kv_port,
                links=list(exported.links),
                tier_blocks=tier_blocks,
            ),
            Serves,
            _BEGIN_S,
        )
        self.bumped(range(len(generations)), generations)
        return serves.offers

    # ---- exporting -----------------------------------------------------------------------------

    def bumped(self, block_ids: Sequence[int], generations: NDArray[np.uint64]) -> None:
        """Tell it that these blocks have the generations that this array has for them now."""
        if self._conversation is None or self.lost:
            return
        ids = np.asarray(block_ids, np.int64)
        self.num_bumps += 1
        self._conversation.say(Bumped(ids.tobytes(), generations[ids].tobytes()))

    async def admit(self, token: bytes) -> None:
        """Let the puller in that shows this token. Raises PeerLost."""
        await self._call(lambda call: AdmitPuller(call, token))

    def dismiss(self, token: bytes) -> None:
        """Do not let it in any more."""
        self._say(Dismiss(token))

    # ---- pulling -------------------------------------------------------------------------------

    async def connect(self, welcome: ExporterWelcome, timeout_s: float) -> FarLink:
        """Prepare to pull from an exporter. Raises as Puller.connect."""
        number = next(self._numbers)
        try:
            connected = await self._ask(
                lambda call: Connect(call, number, welcome, timeout_s), Connected, timeout_s
            )
        except BaseException:
            # It may have been made before it was cancelled. Nobody waits for this answer.
            self._say(Disconnect(next(self._numbers), number))
            raise
        return FarLink(self, number, connected)

    async def pull(
        self,
        link: int,
        ticket: bytes,
        block_table: Sequence[int],
        from_token: int,
        timeout_s: float,
        num_tokens: int | None,
    ) -> Pulled:
        """Pull the ticket's tokens from `from_token` on into the parts of this host."""
        table = np.asarray(block_table, np.int64).tobytes()
        return await self._ask(
            lambda call: Pull(call, link, ticket, table, from_token, timeout_s, num_tokens),
            Pulled,
            timeout_s,
        )

    async def disconnect(self, link: int) -> None:
        """Close a link. Of a host that is lost, there is none any more."""
        with suppress(PeerLost):
            await self._call(lambda call: Disconnect(call, link))

    # ---- host tier -----------------------------------------------------------------------------

    async def store(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks to slots. Returns and raises as HostTier.store."""
        ids, places = _bytes_of(block_ids), _bytes_of(slots)
        await self._call(lambda call: Store(call, ids, places))

    async def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots to blocks. Returns and raises as HostTier.load."""
        ids, places = _bytes_of(block_ids), _bytes_of(slots)
        await self._call(lambda call: LoadBlocks(call, places, ids))

    # ---- the end -------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the connection: the host serves another node."""
        if self._conversation is not None and self._hearing is not None:
            self._hearing.cancel()
            await asyncio.gather(self._hearing, return_exceptions=True)
            self._fail("this node has ended")
            await self._conversation.close()

    # ---- parts ---------------------------------------------------------------------------------

    def _say(self, message: Said) -> None:
        """Say what nobody waits for. To a host that is lost, there is nothing to say."""
        if self._conversation is not None and not self.lost:
            self._conversation.say(message)

    async def _ask(self, make: Callable[[int], Call], kind: type[R], takes_s: float) -> R:
        """Call, and decode what is answered."""
        return msgspec.msgpack.decode(await self._call(make, takes_s), type=kind)

    async def _call(self, make: Callable[[int], Call], takes_s: float = 0.0) -> bytes:
        """Call, and return what is answered. When cancelled, it ends when the agent says so.

        If there is no answer within a bound after the time that it may take, the host is lost.

        Raises:
            PeerLost: the host is lost.
            PdserveError: whatever the agent has raised.
        """
        if self._conversation is None or self.lost:
            raise PeerLost(f"host {self.name}: {self.lost or 'there is no connection yet'}")
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        call = make(number)
        self._conversation.say(call)
        within_s = takes_s + self._answer_s
        silence = f"it has not answered {type(call).__name__} within {within_s:g} s"
        overdue = asyncio.get_running_loop().call_later(within_s, self._fail, silence)
        try:
            answered = await asyncio.shield(answer)
        except asyncio.CancelledError:
            self._say(Cancel(number))
            await wait_ended(answer)
            raise
        finally:
            overdue.cancel()
            del self._calls[number]
        if answered.code:
            raise from_code(answered.code, f"host {self.name}: {answered.message}")
        return answered.result

    async def _hear(self, conversation: HostConversation[Answer]) -> None:
        try:
            while True:
                answer = await conversation.hear()
                waiting = self._calls.get(answer.call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except PeerLost as error:
            self._fail(str(error))

    def _fail(self, how: str) -> None:
        """The host's memory is lost with it, so nothing writes to it any more."""
        self.lost = self.lost or how
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(PeerLost(f"host {self.name}: {how}"))


class FarLink:
    """A link of one host's parts to an exporter."""

    def __init__(self, host: FarHost, number: int, connected: Connected) -> None:
        self.transport = connected.transport
        self.reason = connected.reason
        self._host = host
        self._number = number

    async def pull(
        self,
        ticket: bytes,
        block_table: Sequence[int],
        from_token: int,
        timeout_s: float,
        num_tokens: int | None,
    ) -> Pulled:
        """Pull the ticket's tokens from `from_token` on into the parts of this host."""
        return await self._host.pull(
            self._number, ticket, block_table, from_token, timeout_s, num_tokens
        )

    async def close(self) -> None:
        """Have the host close its link."""
        await self._host.disconnect(self._number)


def _bytes_of(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, np.int64).tobytes()
