"""The life of blocks again, at random and with the real parts: pools, handoffs, tickets, pulls.

Every byte says which prompt, token and layer it is of, so a wrong one is seen wherever it lands.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from decode_node.arrival import Arrival
from decode_node.room import Room
from kv_transfer.links.link import Link
from kv_transfer.ticket import read_ticket
from pdserve.protocol import HandoffEnded, HandoffRecord
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import PdserveError, PeerLost, RequestCancelled
from tests.fakes.transport import FakeNetwork
from tests.matrix import examples
from tests.model.real_nodes import (
    BLOCK,
    LEASE_S,
    PULL_S,
    DecodeSide,
    PrefillSide,
    check_kv,
)
from tests.model.steps import MAX_ROUNDS, SteppedLoop

FAMILIES = (7, 8)  # prompts of one family begin alike
MAX_REQUESTS = 8
MAX_LIVES = 3


class Hazard(Enum):
    """What may come between."""

    PREFILL_CANCELLED = auto()
    DECODE_CANCELLED = auto()
    EXPORTER_CRASHED = auto()
    TIME_PASSED = auto()
    NETWORK_PAUSED = auto()
    NETWORK_BROKEN = auto()


@dataclass(eq=False)
class Intake:
    """One request on the puller's side, from its subscription to its end."""

    request_id: str
    prompt: list[int]
    source: PrefillSide
    link: Link
    tickets: list[tuple[bytes, list[int]]]  # all that anybody ever heard of
    inbox: deque[Any] = field(default_factory=deque)
    arrival: Arrival | None = None
    pull: asyncio.Task[None] | None = None
    pulled: Any = None  # the message that the pull is for
    adopted: list[int] | None = None  # block table; empty: it is over
    is_lost: bool = False  # its session is gone

    def hear(self, message: Any) -> None:
        """It is subscribed."""
        self.inbox.append(message)
        if ticket := getattr(message, "ticket", b""):
            self.tickets.append((ticket, self.prompt))


class HandoffMachine(RuleBasedStateMachine):
    """Two nodes, whatever happens to them."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = SteppedLoop()
        self.network = FakeNetwork()
        self.lives = [PrefillSide(self.loop, self.network, 0)]
        self.decode = DecodeSide(self.loop, self.network)
        self.decode.connect(self.source.exporter)
        self.prompts: dict[str, list[int]] = {}
        self.intakes: list[Intake] = []
        self.old_tickets: list[tuple[bytes, list[int]]] = []  # and the prompts they are of
        self.closing: list[asyncio.Task[None]] = []

    @property
    def source(self) -> PrefillSide:
        return self.lives[-1]

    @initialize(lengths=st.lists(st.integers(1, 3 * BLOCK - 1), min_size=1, max_size=3))
    def begin_with_some_requests(self, lengths: list[int]) -> None:
        for num_tokens in lengths:
            self.start(num_tokens, FAMILIES[0])
            self.subscribe()

    # ---- the exporter --------------------------------------------------------------------------

    @precondition(lambda self: len(self.prompts) < MAX_REQUESTS)
    @rule(num_tokens=st.integers(1, 3 * BLOCK - 1), family=st.sampled_from(FAMILIES))
    def start(self, num_tokens: int, family: int) -> None:
        """A new request arrives on both nodes; the puller may be first, or never come."""
        request_id = f"r{len(self.prompts)}"
        tokens = [family] * min(num_tokens, BLOCK) + [len(self.prompts)] * (num_tokens - BLOCK)
        self.prompts[request_id] = tokens
        self.source.start(request_id, tokens)

    @precondition(lambda self: self.source.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 2 * BLOCK), layer_by_layer=st.booleans())
    def compute(self, data: st.DataObject, num_tokens: int, layer_by_layer: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.source.running)))
        self.source.compute(request_id, num_tokens, layer_by_layer)

    def _crash_exporter(self) -> None:
        """Its sessions end, and a new life begins with an empty pool and new generations."""
        assert self.decode.link is not None
        old = self.source
        self.loop.complete(old.exporter.close())
        self.closing.append(self.loop.create_task(self.decode.link.close()))
        for intake in self.intakes:
            intake.is_lost |= intake.source is old
        self.lives.append(PrefillSide(self.loop, self.network, len(self.lives)))
        self.decode.connect(self.source.exporter)

    # ---- the puller ----------------------------------------------------------------------------

    @precondition(lambda self: len(self.intakes) < len(self.prompts))
    @rule()
    def subscribe(self) -> None:
        request_id = f"r{len(self.intakes)}"
        assert self.decode.link is not None
        prompt = self.prompts[request_id]
        intake = Intake(request_id, prompt, self.source, self.decode.link, self.old_tickets)
        self.intakes.append(intake)
        self.loop.do(lambda: self.source.handoffs.subscribe(request_id, intake.hear))

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """An intake looks at what it was told next."""
        self._go_on(data.draw(st.sampled_from(self.idle)))

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        intake = data.draw(st.sampled_from(self.idle))
        if intake.arrival is None or intake.is_lost:
            return
        intake.inbox.clear()  # it listens for the restart only
        handoffs = intake.source.handoffs
        self.loop.do(lambda: handoffs.renew(intake.request_id, intake.hear))

    @precondition(lambda self: any(intake.adopted for intake in self.intakes))
    @rule()
    def finish(self) -> None:
        """A request has decoded its last token."""
        self._finish(next(intake for intake in self.intakes if intake.adopted))

    @precondition(lambda self: self.old_tickets)
    @rule(data=st.data())
    def use_an_old_ticket(self, data: st.DataObject) -> None:
        """It is good for the bytes it was issued for, or for nothing."""
        ticket, tokens = data.draw(st.sampled_from(self.old_tickets))
        opened = read_ticket(ticket)
        if not self.network.flowing.is_set():
            return
        reserved = self.decode.memory.reserve([], opened.end_token, 0)
        if reserved is None:
            return
        table, _ = reserved
        assert self.decode.link is not None
        pull = self.decode.puller.pull(self.decode.link, ticket, table, 0, PULL_S)
        try:
            self.loop.complete(pull)
        except PdserveError:
            pass
        else:
            span = range(opened.first_token, opened.end_token)
            layers = range(opened.first_layer, opened.end_layer)
            check_kv(self.decode.memory.bytes, table, tokens, span, layers)
        finally:
            self.decode.memory.pool.release(table)

    # ---- the world between ---------------------------------------------------------------------

    @rule(rounds=st.integers(1, 3))
    def step(self, rounds: int) -> None:
        """Reads in flight copy a block in each round."""
        for _ in range(rounds):
            self.loop.round()
        self._collect()

    @precondition(lambda self: self.prompts)
    @rule(hazard=st.sampled_from(Hazard), data=st.data())
    def meet(self, hazard: Hazard, data: st.DataObject) -> None:
        """One rule for all of them: else hardly a request would come to its end."""
        match hazard:
            case Hazard.PREFILL_CANCELLED:
                request_id = data.draw(st.sampled_from(sorted(self.prompts)))
                self.source.cancel(request_id, RequestCancelled("the client has left"))
            case Hazard.DECODE_CANCELLED if self.intakes:
                self._cancel(data.draw(st.sampled_from(self.intakes)))
            case Hazard.EXPORTER_CRASHED if len(self.lives) < MAX_LIVES:
                self._crash_exporter()
            case Hazard.TIME_PASSED:
                self.loop.advance(data.draw(st.sampled_from([LEASE_S, PULL_S])))
                self._collect()
            case Hazard.NETWORK_PAUSED:
                self.network.pause()
            case Hazard.NETWORK_BROKEN:
                self.network.fail_with = PeerLost("the wire was cut")
            case _:
                pass

    @rule()
    def mend_network(self) -> None:
        self.network.fail_with = None
        self.network.resume()

    # ---- what must hold ------------------------------------------------------------------------

    @invariant()
    def live_blocks_hold_their_own_bytes(self) -> None:
        self.source.check()
        for intake in self.intakes:
            if intake.adopted:
                memory, span = self.decode.memory.bytes, range(len(intake.prompt))
                check_kv(memory, intake.adopted, intake.prompt, span)

    @invariant()
    def pools_are_sound(self) -> None:
        self.decode.memory.pool.check_integrity()
        self.source.memory.pool.check_integrity()

    def teardown(self) -> None:
        """Everything goes its way to the end, and every block is free then."""
        try:
            self._run_to_the_end()
            for memory in (self.decode.memory, self.source.memory):
                memory.check_all_free()
            assert len(self.source.handoffs) == self.source.handoffs.num_pinned_blocks == 0
        finally:
            self._close()

    # ---- parts ---------------------------------------------------------------------------------

    def _cancel(self, intake: Intake) -> None:
        if intake.pull is not None:
            intake.pull.cancel()
        elif intake.adopted is None:
            self._give_up(intake)
        else:
            self._finish(intake)

    @property
    def idle(self) -> list[Intake]:
        """Intakes that have something to look at, or whose session is lost."""
        return [
            i
            for i in self.intakes
            if i.pull is None and i.adopted is None and (i.inbox or i.is_lost)
        ]

    def _go_on(self, intake: Intake) -> None:
        if intake.is_lost or isinstance(intake.inbox[0], HandoffEnded):
            self._give_up(intake)
            return
        if intake.arrival is None and not self._take_room(intake):
            return
        assert intake.arrival is not None
        message = intake.inbox.popleft()
        if getattr(message, "is_restart", False):
            intake.arrival.restart()
        if message.ticket:
            pull = intake.arrival.pull(self.decode.puller, message.ticket, ManualClock(0.0), PULL_S)
            intake.pull, intake.pulled = self.loop.create_task(pull), message
            self.loop.round()
            self._collect()
        elif isinstance(message, HandoffRecord):
            self._adopt(intake)

    def _take_room(self, intake: Intake) -> bool:
        num_tokens = len(intake.prompt)
        memory = self.decode.memory
        reserved = memory.reserve(intake.prompt, num_tokens + 1, num_tokens // BLOCK)
        if reserved is None:
            return False
        table, num_reused = reserved
        room = Room(table, num_reused, (0.0, 0.0))
        session = self.decode.session(intake.link)
        intake.arrival = Arrival(intake.request_id, num_tokens, room, session, memory.pool)
        return True

    def _collect(self) -> None:
        """What has become of the pulls."""
        for intake in list(self.intakes):
            if intake.pull is None or not intake.pull.done():
                continue
            pull, intake.pull = intake.pull, None
            if pull.cancelled() or pull.exception() is not None:
                assert pull.cancelled() or isinstance(pull.exception(), PdserveError)
                self._give_up(intake)
            elif isinstance(intake.pulled, HandoffRecord):
                self._adopt(intake)

    def _adopt(self, intake: Intake) -> None:
        assert intake.arrival is not None
        self._settle(intake, was_pulled=True)
        intake.arrival.adopt()
        intake.adopted, intake.arrival = intake.arrival.block_table, None
        self.decode.memory.publish(intake.adopted, intake.prompt, len(intake.prompt))

    def _give_up(self, intake: Intake) -> None:
        if intake.arrival is not None:
            intake.arrival.release()
            intake.arrival = None
        intake.adopted = []
        self._settle(intake, was_pulled=False)

    def _finish(self, intake: Intake) -> None:
        assert intake.adopted is not None
        if intake.adopted:
            self.decode.memory.pool.release(intake.adopted)
        intake.adopted = []

    def _settle(self, intake: Intake, *, was_pulled: bool) -> None:
        """Over the session, or by its end."""
        handoffs = intake.source.handoffs
        if intake.is_lost:
            return
        self.loop.do(lambda: handoffs.settle(intake.request_id, intake.hear, was_pulled=was_pulled))

    def _run_to_the_end(self) -> None:
        self.network.fail_with = None
        self.network.resume()
        for _ in range(MAX_ROUNDS):
            self.loop.round()
            self._collect()
            for intake in self.intakes:
                if intake.adopted is not None:
                    self._finish(intake)
            if self.source.running:
                self.source.compute(next(iter(self.source.running)), 2 * BLOCK, False)
            elif self.idle:
                self._go_on(self.idle[0])
            elif all(intake.pull is None for intake in self.intakes):
                break
        for intake in self.intakes:
            if intake.adopted is None:  # nobody has anything to tell it: its request never came
                self._give_up(intake)
            self._finish(intake)
        self.loop.advance(LEASE_S)
        self.loop.round()

    def _close(self) -> None:
        try:
            self._close_nodes()
        finally:
            self.loop.close()

    def _close_nodes(self) -> None:
        assert self.decode.link is not None
        self.loop.complete(self.decode.link.close())
        for task in self.closing:  # gather would look for a loop outside of this one
            self.loop.complete(asyncio.wait_for(task, None))
        self.loop.complete(self.decode.puller.close())
        for life in self.lives:
            self.loop.complete(life.exporter.close())
            life.memory.bytes.close()
        self.decode.memory.bytes.close()


class ForgetfulMachine(HandoffMachine):
    """Its exporters do not bump the generations of freed blocks."""

    def __init__(self) -> None:
        super().__init__()
        _forget(self.source)

    def _crash_exporter(self) -> None:
        super()._crash_exporter()
        _forget(self.source)


def _forget(source: PrefillSide) -> None:
    source.memory.pool._bump_generations = lambda block_ids: None


SETTINGS = settings(max_examples=examples(100), stateful_step_count=60, derandomize=True)
TestHandoffs = HandoffMachine.TestCase
TestHandoffs.settings = SETTINGS


@pytest.mark.long
def test_these_random_walks_can_fail() -> None:
    until_found = settings(
        SETTINGS, max_examples=1000, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises(AssertionError, match=r"token \d+ in layer \d is 0x"):
        run_state_machine_as_test(ForgetfulMachine, settings=until_found)
