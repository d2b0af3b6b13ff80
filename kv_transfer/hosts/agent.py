"""The agent of a node's later host: it does with the parts here what the node says.

It runs in a thread with an event loop of its own, as long as the node has a connection to it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kv_transfer.exporter import Exporter, SpreadPool
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.hosts.conversation import HostConversation, encoded
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
from kv_transfer.links.sharded_link import AnyLink
from kv_transfer.puller import Puller
from kv_transfer.sharded_pool import ShardedPool, parts_here
from kv_transfer.threads import to_its_end
from kv_transfer.ticket import Ticket
from kv_transfer.tier import SlotCopies, TierCopies
from kv_transfer.transports.catalog import choose_kinds
from kv_transfer.transports.tls import NodeTls
from pdserve import _native
from pdserve.shared.clock import Clock, SystemClock
from pdserve.shared.errors import PdserveError, PeerLost, TransferCancelled
from pdserve.shared.process.may_pass import config_error
from pdserve.shared.simulated_link import link_between, parse_link

log = logging.getLogger(__name__)

BUMPS_S: Final = 30.0  # for what the node has said before a step to come
_SAID: Final = msgspec.msgpack.Decoder(Said)

MakeTier = Callable[[int], Sequence[TierCopies]]  # slots |-> the copies of each part here


class Agent:
    """The KV of one later host, from the node's connection to its end."""

    def __init__(
        self,
        pool: ShardedPool,
        host: str,
        advertised: str,
        make_tier: MakeTier,
        tls: NodeTls | None = None,
        bumps_s: float = BUMPS_S,
    ) -> None:
        """Nothing runs yet.

        Args:
            pool: the node's; it outlives this.
            host: to listen on.
            advertised: where pullers reach it.
            make_tier: makes the host tier of the parts here.
            tls: how connections are secured.
            bumps_s: how long to wait for what the node has said before a step.
        """
        self._pool = pool
        self._host = host
        self._advertised = advertised
        self._make_tier = make_tier
        self._tls = tls
        self._bumps_s = bumps_s
        self._num_bumps = 0
        self._has_bumped = threading.Condition()
        self._is_over = False
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._links: dict[int, AnyLink] = {}
        self._exporter: Exporter | None = None
        self._puller: Puller | None = None
        self._tier: SlotCopies | None = None

    def wait_bumps(self, num_bumps: int) -> None:
        """Wait until so many messages about generations have come. For another thread.

        Raises:
            PeerLost: there is no connection any more, or they do not come in time.
        """
        with self._has_bumped:
            self._has_bumped.wait_for(
                lambda: self._num_bumps >= num_bumps or self._is_over, self._bumps_s
            )
            if self._num_bumps < num_bumps:
                raise PeerLost(
                    "the connection for KV broke"
                    if self._is_over
                    else f"it has not said within {self._bumps_s:g} s which blocks the step reuses"
                )

    async def serve(self, sock: socket.socket) -> None:
        """Do what the node says over its connection until that breaks.

        Once this has raised, also by cancellation, nothing here touches the pool.

        Raises:
            PeerLost: it broke.
        """
        conversation = HostConversation(sock, _SAID)
        try:
            while True:
                self._heed(conversation, await conversation.hear())
        finally:
            await to_its_end(self._end(conversation))

    def over(self) -> None:
        """Nothing is heard any more: whoever waits for bumps need not. For any thread."""
        with self._has_bumped:
            self._is_over = True
            self._has_bumped.notify_all()

    # ---- calls ---------------------------------------------------------------------------------

    def _heed(self, conversation: HostConversation[Said], said: Said) -> None:
        match said:
            case Bumped():
                self._bumped(said)
            case Dismiss(token=token):
                if self._exporter is not None:
                    self._exporter.forget(token)
            case Cancel(call=call):
                if call in self._calls:
                    self._calls[call].cancel()
            case _:
                task = asyncio.create_task(self._answer(conversation, said))
                self._calls[said.call] = task
                task.add_done_callback(partial(self._answered, conversation, said.call))

    async def _answer(self, conversation: HostConversation[Said], call: Call) -> None:
        answer = Answer(call.call)
        try:
            answer = Answer(call.call, encoded(await self._do(call)))
        except asyncio.CancelledError:
            answer = Answer(call.call, code=TransferCancelled.code, message="it was cancelled")
        except PdserveError as error:
            answer = Answer(call.call, code=error.code, message=error.message)
        except Exception as error:
            log.exception("%s failed", type(call).__name__)
            answer = Answer(call.call, code=PdserveError.code, message=repr(error))
        conversation.say(answer)

    def _answered(
        self, conversation: HostConversation[Said], call: int, task: asyncio.Task[None]
    ) -> None:
        del self._calls[call]
        if task.cancelled():  # before it had begun
            code, message = TransferCancelled.code, "it was cancelled"
            conversation.say(Answer(call, code=code, message=message))

    async def _end(self, conversation: HostConversation[Said]) -> None:
        """End all that runs here; afterwards nothing here touches the pool."""
        self.over()
        calls = list(self._calls.values())
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        async with AsyncExitStack() as closing:  # closes all, even if one fails
            closing.push_async_callback(conversation.close)
            if self._tier is not None:
                closing.callback(self._tier.close)
            if self._puller is not None:
                closing.push_async_callback(self._puller.close)
            if self._exporter is not None:
                closing.push_async_callback(self._exporter.close)
            for link in self._links.values():
                closing.push_async_callback(link.close)

    # ---- what is said --------------------------------------------------------------------------

    async def _do(self, call: Call) -> msgspec.Struct | None:
        """Do it; raises what the node is to be told."""
        match call:
            case Begin():
                return await self._begin(call)
            case AdmitPuller(token=token):
                self._begun[0].admit(token)
            case Connect():
                return await self._connect(call)
            case Disconnect(link=number):
                with suppress(KeyError):
                    await self._links.pop(number).close()
            case Pull():
                return await self._pull(call)
            case Store(block_ids=block_ids, slots=slots):
                await self._slots.store(_ids(block_ids).tolist(), _ids(slots).tolist())
            case LoadBlocks(slots=slots, block_ids=block_ids):
                await self._slots.load(_ids(slots).tolist(), _ids(block_ids).tolist())
        return None

    async def _begin(self, said: Begin) -> Serves:
        """Serve the parts here, and prepare to pull into them."""
        if self._exporter is not None:
            raise PeerLost("the node has begun already")
        identity = KvIdentity(
            said.model_id, said.revision, said.layout, said.num_stages, said.windows
        )
        kinds = choose_kinds(said.transports, self._pool)
        system = SystemClock()
        self._exporter = exporter = Exporter(
            said.node_id,
            said.incarnation,
            identity,
            self._pool,
            _ShiftedClock(system, said.now_s - system.now()),
            kinds,
            tls=self._tls,
            spread=SpreadPool(ticket_key=said.ticket_key, on_ticket=self._catch_up),
        )
        links = [parse_link(text) for text in said.links]
        self._puller = Puller(
            self._pool,
            identity,
            host_id(),
            kinds,
            name=exporter.name,
            simulated=lambda other: link_between(links, other, said.node_id),
            tls=self._tls,
        )
        if said.tier_blocks:
            # A thread cannot be stopped: what it has pinned is closed with the rest.
            await to_its_end(asyncio.to_thread(self._pin, said.tier_blocks))
        try:
            await exporter.start(self._host, self._advertised, said.kv_port)
        except OSError as error:
            raise config_error(f"cannot listen on {self._host}: {error}", error) from error
        return Serves([replace(offer, host_id=host_id()) for offer in exporter.offers])

    def _pin(self, tier_blocks: int) -> None:
        self._tier = SlotCopies(self._make_tier(tier_blocks))

    @property
    def _begun(self) -> tuple[Exporter, Puller]:
        if self._exporter is None or self._puller is None:
            raise PeerLost("the node has not begun")
        return self._exporter, self._puller

    @property
    def _slots(self) -> SlotCopies:
        if self._tier is None:
            raise PeerLost("the node has no host tier")
        return self._tier

    async def _connect(self, said: Connect) -> Connected:
        link = await self._begun[1].connect(said.welcome, said.timeout_s)
        self._links[said.link] = link
        return Connected(link.transport, link.reason)

    async def _pull(self, said: Pull) -> Pulled:
        link = self._links.get(said.link)
        if link is None:
            raise TransferCancelled("the link is closed")
        table = _ids(said.block_table).tolist()
        pull = partial(self._begun[1].pull, link, said.ticket, table)
        result = await pull(said.from_token, said.timeout_s, num_tokens=said.num_tokens)
        return Pulled(result.bytes, result.read_s)

    # ---- generations ---------------------------------------------------------------------------

    def _bumped(self, said: Bumped) -> None:
        self._raise(_ids(said.block_ids), np.frombuffer(said.generations, np.uint64))
        with self._has_bumped:
            self._num_bumps += 1
            self._has_bumped.notify_all()

    def _catch_up(self, ticket: Ticket) -> None:
        """A ticket may come before what the node says of its blocks, which it has sealed in."""
        ids = np.array(ticket.block_ids, np.int64)
        self._raise(ids, np.array(ticket.generations, np.uint64))

    def _raise(self, ids: NDArray[np.int64], generations: NDArray[np.uint64]) -> None:
        """Make tickets for earlier generations of these blocks stale."""
        for part in parts_here(self._pool).values():
            while len(behind := ids[part.generations[ids] < generations]):
                _native.bump_generations(part.generations, behind)


class _ShiftedClock:
    """Another host's clock, as far as the time that a message takes."""

    def __init__(self, clock: Clock, ahead_s: float) -> None:
        self._clock = clock
        self._ahead_s = ahead_s

    def now(self) -> float:
        """Seconds since an arbitrary point; only differences are meaningful."""
        return self._clock.now() + self._ahead_s


def _ids(sent: bytes) -> NDArray[np.int64]:
    return np.frombuffer(sent, np.int64)
