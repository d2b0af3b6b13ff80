"""Interrupted requests: they go on elsewhere, exactly where they were.

    its node is lost, or fails its leg ──► withdrawn ──► waits for a node ──► dispatched again
                                                              ▲                   │      │
                                                              └──── no token yet ─┘   a token

What a request samples depends on its tokens, its seed and the position alone, so it only has to be
sent again with what it has emitted. Higher priorities go first, then those that are late. A node is
given a few at a time: the others can still go to a node that comes back, and prompts of new
requests get in between. None waits for those of lower priority, which may find no place there. One
that has failed again waits for longer each time: a node that is gone refuses within milliseconds
what it is sent, until it is missed.

A request may be the cause: each node that begins to compute it dies. So one that has been through
two failures of nodes without a token in between is suspected. That alone proves nothing: two nodes
may be killed at once. Suspects are sent one at a time; the one whose node fails then is convicted,
and its prompt is quarantined.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Final

import msgspec

from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member, Registry
from coordinator.requests.dispatcher import Dispatcher
from coordinator.requests.running import RunningRequest
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import NodeRole, NodeState, Slo
from pdserve.shared.clock import Clock
from pdserve.shared.errors import NoNodeAvailable, PdserveError, RequestQuarantined

log = logging.getLogger(__name__)

QUARANTINE_S: Final = 600.0
MOST_QUARANTINED: Final = 1024
MOST_ATTEMPTS: Final = 6  # without a token in between
SUSPECT: Final = 2  # failures of nodes without a token in between
_LATER_S: Final = 0.01  # timers are rounded
_LOOK_S: Final = 1.0  # between two looks whether a node that is loading is still there
BACK_OFF_S: Final = 0.25  # before the third attempt without a token; doubles with each further one
MOST_PER_NODE: Final = 8  # interrupted requests that are sent to the nodes and have no token yet


@dataclass(slots=True)
class _Trouble:
    """What has happened to a request since its last token."""

    since_s: float
    slo: Slo  # that it was admitted with
    wait_s: float  # for which it waits for a node
    error: PdserveError  # the newest; ends the request if it cannot go on
    num_attempts: int = 0
    waits_since_s: float = 0.0  # for a node
    not_before_s: float = 0.0  # when it is sent again, at the earliest
    failures: set[str] = field(default_factory=set)  # which nodes have failed that had it
    left: str = ""  # the incarnation of the node that computed it last
    tried_at: int = 0  # number of failures when it was tried alone; 0: it was not

    @property
    def waits_until_s(self) -> float:
        """When it has waited for a node for too long."""
        return self.waits_since_s + self.wait_s


@dataclass(frozen=True, slots=True)
class Stranded:
    """An interrupted request that waits for a node."""

    tenant: str
    priority: int
    since_s: float
    wait_s: float  # for which it waits


class Resumes:
    """The interrupted requests of one coordinator."""

    def __init__(
        self,
        registry: Registry,
        dispatcher: Dispatcher,
        metrics: CoordinatorMetrics,
        clock: Clock,
        wait_s: float,
        comes_back: Callable[[NodeRole], bool],
    ) -> None:
        """
        Args:
            registry: the nodes.
            dispatcher: sends requests again.
            metrics: the coordinator's.
            clock: for `wait_s` and for the gaps that clients see.
            wait_s: how long a request waits for a node that could take it.
            comes_back: whether a node of the pool was lost, and is being started again.
        """
        self.quarantine = Quarantine(clock)
        self._registry = registry
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._clock = clock
        self._wait_s = wait_s
        self._comes_back = comes_back
        self._troubles: dict[str, _Trouble] = {}  # by request id
        self._waiting: dict[str, RunningRequest] = {}
        self._under_way: dict[str, int] = {}  # dispatched again, no token yet |-> priority
        self._on_trial: str | None = None  # the suspect among these
        self._next_look: asyncio.Handle | None = None
        self._next_end: asyncio.TimerHandle | None = None  # when the first has waited for too long
        metrics.watch(
            "resuming_requests",
            "Interrupted requests that have no further token yet",
            lambda: len(self._waiting) + len(self._under_way),
        )

    def interrupted(
        self, running: RunningRequest, error: PdserveError, reason: str, failure: str = ""
    ) -> None:
        """Withdraw a request from its nodes, to send it again.

        Args:
            running: is on nodes.
            error: ends the request if it cannot go on.
            reason: a word for the metrics.
            failure: what has failed, perhaps because of the request: an incarnation of a node, or a
                step; empty: nothing that a request could cause.
        """
        assert running.dispatch is not None
        request_id, slo = running.request_id, running.dispatch.slo
        revision = running.dispatch.booking.placement.revision
        had_token_one = running.has_token_one
        computed = running.dispatch.decode if had_token_one else running.dispatch.computes_prompt
        self._metrics.revision_requests.labels(revision, reason).inc()
        self._dispatcher.withdraw(running, error.message)
        self._metrics.interruptions.labels(reason=reason).inc()
        trouble = self._trouble_of(running, slo, error)
        trouble.num_attempts += 1
        trouble.left = computed.hello.incarnation if computed is not None else ""
        if failure:
            trouble.failures.add(failure)
        elif trouble.num_attempts > 1:
            self._back_off(trouble)
        self._no_longer_under_way(request_id)
        self._wait(running)
        self.look()

    def postpone(
        self,
        running: RunningRequest,
        slo: Slo,
        error: NoNodeAvailable,
        wait_s: float | None = None,
    ) -> None:
        """Send a request that was not sent when it was its turn, as soon as there is a node.

        Args:
            running: is on no node.
            slo: the promise that it was admitted with.
            error: ends the request if no node comes.
            wait_s: how long it waits for one; None: as those that go on.
        """
        trouble = self._trouble_of(running, slo, error)
        if wait_s is not None:
            trouble.wait_s = wait_s
        self._wait(running)
        self.look()

    def stranded(self) -> list[Stranded]:
        """Return those that wait while there are no nodes: theirs were lost, or have left."""
        if self._dispatcher.can_route:
            return []
        troubles = (self._troubles[request_id] for request_id in self._waiting)
        return [Stranded(t.slo.tenant, t.slo.priority, t.waits_since_s, t.wait_s) for t in troubles]

    def ended(self, running: RunningRequest) -> None:
        """Forget a request."""
        if self._troubles.pop(running.request_id, None) is not None:
            self._waiting.pop(running.request_id, None)
            self._no_longer_under_way(running.request_id)

    def failed(self, member: Member) -> None:
        """Accuse those that have just left a node, which is found to have failed.

        One whose prefill node dies may be given up by its decode node before that is known here.
        """
        for trouble in self._troubles.values():
            if trouble.left == member.hello.incarnation:
                trouble.failures.add(member.hello.incarnation)

    def changed(self, member: Member) -> None:
        """Send again what can be sent; a node that is back, and had not failed, accuses nobody."""
        if member.is_ready:
            for trouble in self._troubles.values():
                trouble.failures.discard(member.hello.incarnation)
        self.look()

    def look(self) -> None:
        """Send again what can be sent: something has changed. Done soon, once for many changes."""
        if self._waiting and self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_soon(self._send)

    # ---- parts ---------------------------------------------------------------------------------

    def _trouble_of(self, running: RunningRequest, slo: Slo, error: PdserveError) -> _Trouble:
        trouble = self._troubles.get(running.request_id)
        if trouble is None:
            trouble = _Trouble(self._clock.now(), slo, self._wait_s, error)
            self._troubles[running.request_id] = trouble
        trouble.error = error
        return trouble

    def _wait(self, running: RunningRequest) -> None:
        """Wait for a node, for `wait_s` at most, and longer while one of its pool is coming.

        Time does not count in which it has been on one, or others have had their turn.
        """
        self._waiting[running.request_id] = running
        self._troubles[running.request_id].waits_since_s = self._clock.now()
        running.waits_to_resume = True

    def _back_off(self, trouble: _Trouble) -> None:
        wait_s = BACK_OFF_S * 2.0 ** (trouble.num_attempts - 2)
        trouble.not_before_s = self._clock.now() + wait_s
        asyncio.get_running_loop().call_later(wait_s + _LATER_S, self.look)

    def _send(self) -> None:
        self._next_look = None
        self._give_up()
        most, is_full = MOST_PER_NODE * sum(member.is_ready for member in self._registry), False
        for request_id in sorted(self._waiting, key=self._rank) if most else ():
            trouble, now_s = self._troubles[request_id], self._clock.now()
            priority, is_suspect = trouble.slo.priority, self._is_suspect(request_id)
            if trouble.not_before_s > now_s:
                continue
            is_full = is_full or sum(p >= priority for p in self._under_way.values()) >= most
            if is_full or (is_suspect and self._on_trial is not None):
                trouble.waits_since_s = now_s  # it waits for its turn, and not for a node
                continue
            running = self._waiting[request_id]
            try:
                placement = self._dispatcher.place(running.request, running.hashes)
            except NoNodeAvailable:
                continue  # it waits for one
            del self._waiting[request_id]
            running.waits_to_resume = False
            if running.request.revision not in ("", placement.revision):
                log.warning(
                    "%s goes on at revision %s, which computes its KV again: there are no nodes of "
                    "its own, %s",
                    request_id,
                    placement.revision,
                    running.request.revision,
                )
            self._under_way[request_id] = priority
            if is_suspect:
                self._on_trial = request_id
                trouble.tried_at = len(trouble.failures)
            running.on_further = partial(self._goes_on, request_id)
            slo = self._dispatcher.slo_left(running, trouble.slo)
            self._dispatcher.dispatch(running, placement, slo)
        self._end_overdue()

    def _give_up(self) -> None:
        """End what has failed too often, and what has brought nodes down."""
        for request_id, running in list(self._waiting.items()):
            if request_id not in self._waiting:
                continue  # ended with another answer to its prompt
            trouble = self._troubles[request_id]
            if len(trouble.failures) > trouble.tried_at > 0:
                self._convict(running)
            elif trouble.num_attempts > MOST_ATTEMPTS:
                self._end(running)

    def _end_overdue(self) -> None:
        """End what has waited for too long, and look again when the next one will have."""
        now_s, is_one_coming = self._clock.now(), self._is_one_coming()
        for request_id, running in list(self._waiting.items()):
            is_left = request_id in self._waiting  # it may have ended with another answer
            is_overdue = is_left and self._troubles[request_id].waits_until_s <= now_s
            if is_overdue and not is_one_coming:
                self._end(running)
        if self._next_end is not None:
            self._next_end.cancel()
            self._next_end = None
        if self._waiting:
            until_s = min(self._troubles[request_id].waits_until_s for request_id in self._waiting)
            in_s = max(until_s - now_s + _LATER_S, _LOOK_S if is_one_coming else 0.0)
            self._next_end = asyncio.get_running_loop().call_later(in_s, self.look)

    def _is_one_coming(self) -> bool:
        """Whether a pool without a ready node gets one: it loads, or is being started again."""
        ready = {member.role for member in self._registry if member.is_ready}
        loading = {
            member.role
            for member in self._registry
            if member.load.state is NodeState.LOADING and not member.is_standby
        }
        return any(
            role in loading or self._comes_back(role) for role in NodeRole if role not in ready
        )

    def _end(self, running: RunningRequest) -> None:
        error = self._troubles[running.request_id].error
        log.warning("%s cannot go on: %s", running.request_id, error)
        running.end(error)

    def _convict(self, running: RunningRequest) -> None:
        log.error("%s is quarantined: nodes fail that compute it", running.request_id)
        self.quarantine.add(running.request)
        running.end(
            RequestQuarantined(
                f"{len(self._troubles[running.request_id].failures)} nodes have failed while they "
                "computed this request, one after the other; it is not tried again"
            )
        )

    def _goes_on(self, request_id: str) -> None:
        """The request has a further token."""
        trouble = self._troubles.pop(request_id)
        if trouble.num_attempts:  # else it was only postponed
            self._metrics.interruption_gap.observe(self._clock.now() - trouble.since_s)
        self._no_longer_under_way(request_id)

    def _no_longer_under_way(self, request_id: str) -> None:
        self._under_way.pop(request_id, None)
        if self._on_trial == request_id:
            self._on_trial = None
        self.look()

    def _is_suspect(self, request_id: str) -> bool:
        return len(self._troubles[request_id].failures) >= SUSPECT

    def _rank(self, request_id: str) -> tuple[int, float]:
        """Its priority, and when its next token was due, or would be if all had one promise."""
        trouble = self._troubles[request_id]
        slo = trouble.slo
        return -slo.priority, trouble.since_s + (slo.tpot_s or slo.ttft_s or self._wait_s)


class Quarantine:
    """The prompts of requests that were convicted, by hash: for a while, no node is asked for them.

    A tenant's quarantine is its own: nobody can have the prompts of others refused.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # oldest first

    def add(self, request: GenerationRequest) -> None:
        """Keep the request's prompt out from now on."""
        key = _key(request)
        self._until_s[key] = self._clock.now() + QUARANTINE_S
        self._until_s.move_to_end(key)
        if len(self._until_s) > MOST_QUARANTINED:
            self._until_s.popitem(last=False)

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestQuarantined if nodes have died of this prompt lately."""
        now_s = self._clock.now()
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            self._until_s.popitem(last=False)
        if self._until_s and (until_s := self._until_s.get(_key(request))) is not None:
            raise RequestQuarantined(
                "several nodes have failed while they computed this prompt; it is not accepted for "
                f"another {until_s - now_s:.0f} s"
            )


def _key(request: GenerationRequest) -> bytes:
    whose = request.slo.tenant, request.prompt.token_ids
    return blake2b(msgspec.msgpack.encode(whose), digest_size=16).digest()
