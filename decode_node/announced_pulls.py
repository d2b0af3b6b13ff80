"""Pulls the KV of handed-off requests part by part, as it is announced.

Of several answers to one prompt, the first pulls its KV. The others wait, and then find all full
blocks in the prefix cache. They pull only the last block, each into a block of its own, since each
of them writes further KV there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from decode_node.arrival import Arrival
from kv_transfer.puller import Pulls
from pdserve.lifecycle import RecordTimes
from pdserve.node.prefixes.cost import PullCosts
from pdserve.node.sessions.session import Session
from pdserve.node.sessions.subscription import Notice, Subscription
from pdserve.protocol import Announcement, HandoffRecord
from pdserve.settings.timeouts import NodeTimeouts
from pdserve.shared.clock import Clock
from pdserve.shared.errors import MalformedMessage, StaleIncarnation, TicketInvalid

log = logging.getLogger(__name__)

_OLD: Final = 0.5  # share of its lifetime after which a ticket is renewed


@dataclass(frozen=True, slots=True)
class ReceivedHandoff:
    """A request whose KV has arrived completely."""

    record: HandoffRecord
    prefill_end_s: float  # on this node's clock
    times: RecordTimes


class AnnouncedPulls:
    """Follows announcements from the first one to the handoff record, and pulls each part."""

    def __init__(
        self,
        puller: Pulls,
        costs: PullCosts,
        clock: Clock,
        timeouts: NodeTimeouts,
        host_id: str,
    ) -> None:
        """`costs` learn from every pull."""
        self.num_renewals = 0  # of tickets that had become old
        self._puller = puller
        self._costs = costs
        self._clock = clock
        self._timeouts = timeouts
        self._host_id = host_id

    async def receive(
        self, first: Notice, subscription: Subscription, session: Session, arrival: Arrival
    ) -> ReceivedHandoff:
        """Pull all of a request's KV; `first` is the first notice of its subscription.

        A stream ends on its node, and its record comes, once what it has completed is here.

        Raises:
            MalformedMessage: the handoff record does not match the leg or the announcements.
            PdserveError: the handoff ended, or a pull failed; as Arrival.pull.
        """
        notice, was_refused = first, False
        while True:
            message = notice.message
            if message.ticket and self._is_old(notice):
                self.num_renewals += 1
                notice = await subscription.renew()
                continue
            if isinstance(message, Announcement) and message.is_restart:
                arrival.restart()
            if isinstance(message, HandoffRecord):
                arrival.ends_with(message)
            elif not message.ticket:
                subscription.take_over()
            pulling_s = self._clock.now()
            if message.ticket:
                transfer_s = self._timeouts.transfer_s
                try:
                    pulled = await arrival.pull(
                        self._puller, message.ticket, self._clock, transfer_s
                    )
                except (TicketInvalid, StaleIncarnation) as error:  # damaged on the way, perhaps
                    if was_refused:
                        raise
                    log.warning("a ticket was refused, and is renewed: %s", error)
                    was_refused = True
                    notice = await subscription.renew()
                    continue
                if pulled.bytes:
                    transport = session.link.transport
                    self._costs.observe_pull(transport, pulled.bytes, pulled.seconds)
            if isinstance(message, HandoffRecord):
                _check_announced(message, arrival)
                return self._received(message, notice, session, pulling_s)
            notice = await subscription.next()

    def _is_old(self, notice: Notice) -> bool:
        age_s = self._clock.now() - notice.received_s
        return age_s > self._timeouts.ticket_s * _OLD

    def _received(
        self, record: HandoffRecord, notice: Notice, session: Session, pulling_s: float
    ) -> ReceivedHandoff:
        """Make the result; from another host, whose clock differs, times begin with the reading."""
        read_s = end_s = made_s = written_s = notice.received_s
        if session.link.welcome.host_id == self._host_id:
            end_s = min(record.prefill_end_s, read_s)
            made_s = min(max(record.made_s, end_s), read_s)
            written_s = min(max(record.written_s, made_s), read_s)
        times = RecordTimes(made_s, written_s, read_s, pulling_s, self._clock.now())
        return ReceivedHandoff(record, end_s, times)


def _check_announced(record: HandoffRecord, arrival: Arrival) -> None:
    """Check that the announcements before the record have left nothing out."""
    if arrival.num_announced_tokens != record.num_tokens:
        raise MalformedMessage(
            f"{record.request_id} was announced up to token {arrival.num_announced_tokens}, its "
            f"handoff record says {record.num_tokens}"
        )


@dataclass(slots=True)
class _Pull:
    """The first pull of a prompt."""

    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    was_adopted: bool = False


class PromptPulls:
    """The prompts whose KV is being pulled."""

    def __init__(self) -> None:
        self._pulls: dict[str, _Pull] = {}  # by prompt id

    def __contains__(self, prompt_id: str) -> bool:
        """Whether the prompt is being pulled already; other requests then wait for its end."""
        return prompt_id in self._pulls

    @asynccontextmanager
    async def turn(self, prompt_id: str, subscription: Subscription) -> AsyncIterator[None]:
        """Enter as the first request of the prompt, or once the first one has been adopted.

        If the first request fails, another one becomes the first. No request waits beyond the end
        of its handoff.

        Raises:
            PdserveError: the handoff has ended; as Subscription.wait.
        """
        while (pull := self._pulls.get(prompt_id)) is not None:
            await subscription.wait(pull.is_over)
            if pull.was_adopted:
                yield
                return
        pull = self._pulls[prompt_id] = _Pull()
        try:
            yield
            pull.was_adopted = True
        finally:
            del self._pulls[prompt_id]
            pull.is_over.set()
