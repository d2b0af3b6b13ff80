"""A link whose reads break: retried, replanned, given up, and no channel left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.links.link import Link, open_link
from kv_transfer.spans.box import KvBox
from kv_transfer.statistics import PullerStatistics
from kv_transfer.transports.interface import Read
from pdserve.protocol import ExporterWelcome, TransportOffer
from pdserve.shared.errors import (
    AccessDenied,
    PdserveError,
    PeerLost,
    StaleIncarnation,
    StaleTicket,
    TicketInvalid,
    TransferCancelled,
    TransferTimeout,
    TransportUnavailable,
)
from tests.matrix import examples
from tests.unit.kv_transfer.pairs import SMALL

NOTHING = np.empty(0, dtype=np.int64)
READ = Read(
    b"",
    KvBox(0, 0, 0, 0, 0, 0),
    NOTHING,
    NOTHING.astype(np.uint64),
    np.empty((0, 3), dtype=np.int64),
    0,
    None,  # type: ignore[arg-type]  # what reads here goes nowhere
)

Outcome = PdserveError | asyncio.Event | tuple[asyncio.Event, PdserveError] | None


async def follow(outcome: Outcome) -> None:
    """An event is waited for, an error raised; nothing is success."""
    match outcome:
        case asyncio.Event():
            await outcome.wait()
        case PdserveError():
            raise outcome
        case (event, error):
            await event.wait()
            raise error


class Channel:
    """Ends its reads as the transport's script says; keeps an eye on its user."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.in_flight = 0
        self.num_closes = 0

    async def read(self, read: Read) -> None:
        assert self.num_closes == 0, "a read on a closed channel"
        script = self._transport.reads
        outcome = script.pop(0) if script else None
        self.in_flight += 1
        try:
            await asyncio.sleep(0)
            await follow(outcome)
        finally:
            self.in_flight -= 1

    async def close(self) -> None:
        assert self.in_flight == 0, "closed under a read"
        self.num_closes += 1
        await asyncio.sleep(0)


class Transport:
    """Connects and reads as its scripts say; well, when they are at an end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.connects: list[Outcome] = []
        self.reads: list[Outcome] = []
        self.channels: list[Channel] = []
        self.impossible: str | None = None

    def obstacle(self, offer: TransportOffer, welcome: ExporterWelcome) -> str | None:
        return self.impossible

    async def connect(self, offer: TransportOffer, welcome: ExporterWelcome) -> Channel:
        outcome = self.connects.pop(0) if self.connects else None
        await asyncio.sleep(0)
        await follow(outcome)
        self.channels.append(Channel(self))
        return self.channels[-1]

    async def close(self) -> None:
        raise AssertionError("the puller's business")


class Roads:
    """Two transports, and a link over the better one."""

    def __init__(self) -> None:
        self.fast, self.slow = Transport("fast"), Transport("slow")
        self.statistics = PullerStatistics()
        self.offers = [TransportOffer(name="slow"), TransportOffer(name="fast")]

    async def open(self, *, reconnect_s: float = 2.0) -> Link:
        welcome = ExporterWelcome(
            node_id="p0",
            incarnation="life-1",
            fingerprint="",
            layout=SMALL,
            num_blocks=1,
            memory="cpu",
            host_id="here",
            access=b"",
            offers=self.offers,
        )
        roads = [self.fast, self.slow]
        return await open_link(welcome, roads, 5, self.statistics, reconnect_s=reconnect_s)

    @property
    def channels(self) -> list[Channel]:
        return self.fast.channels + self.slow.channels

    @property
    def counted(self) -> tuple[int, int]:
        return self.statistics.retried, self.statistics.replanned

    def assert_all_closed(self) -> None:
        assert [channel.num_closes for channel in self.channels] == [1] * len(self.channels)


@pytest.fixture
def roads() -> Roads:
    return Roads()


def broken(number: int = 1) -> PeerLost:
    return PeerLost(f"break {number}")


async def pull(link: Link, timeout_s: float = 5) -> None:
    """One read within the bounds of a pull."""
    async with link.pulling(timeout_s):
        await link.read(READ)


async def settled() -> None:
    """Until every task has come to a wait; what is scripted takes a few steps at most."""
    for _ in range(20):
        await asyncio.sleep(0)


# ---- retrying ----------------------------------------------------------------------------------


async def test_a_read_that_breaks_once_stays_on_its_transport(roads: Roads) -> None:
    link = await roads.open()
    roads.fast.reads = [broken()]
    await pull(link)
    assert (link.transport, link.reason) == ("fast", "the best transport there is")
    assert (len(roads.fast.channels), len(roads.slow.channels)) == (2, 0)
    assert roads.counted == (1, 0)
    await pull(link)
    assert len(roads.fast.channels) == 2
    await link.close()
    roads.assert_all_closed()


async def test_a_read_that_breaks_twice_moves_on_and_the_link_stays_there(roads: Roads) -> None:
    link = await roads.open()
    roads.fast.reads = [broken(1), broken(2)]
    await pull(link)
    assert (link.transport, link.reason) == ("slow", "fast: broke: break 2")
    assert roads.counted == (1, 1)
    await pull(link)
    assert (len(roads.fast.channels), len(roads.slow.channels)) == (2, 1)
    await link.close()
    roads.assert_all_closed()


async def test_breaks_of_two_reads_do_not_add_up(roads: Roads) -> None:
    link = await roads.open()
    for _ in range(3):
        roads.fast.reads = [broken()]
        await pull(link)
    assert link.transport == "fast"
    assert roads.counted == (3, 0)
    await link.close()
    roads.assert_all_closed()


async def test_when_all_is_spent_the_first_error_comes_out(roads: Roads) -> None:
    link = await roads.open()
    roads.fast.reads = [broken(1), broken(2)]
    roads.slow.reads = [broken(3), broken(4)]
    with pytest.raises(PeerLost, match=r"^break 1$"):
        await pull(link)
    assert (len(roads.fast.channels), len(roads.slow.channels)) == (2, 2)
    assert roads.counted == (2, 1)
    assert link.transport == "none"
    assert link.reason == "fast: broke: break 2; slow: broke: break 4"
    await pull(link)  # the next one begins with the best again
    assert link.transport == "fast"
    assert roads.counted == (2, 1)
    await link.close()
    roads.assert_all_closed()


@pytest.mark.parametrize("error", [broken(9), AccessDenied("no"), TransportUnavailable("no")])
async def test_a_transport_that_cannot_be_reached_again_is_passed_over(
    roads: Roads, error: PdserveError
) -> None:
    link = await roads.open()
    roads.fast.reads, roads.fast.connects = [broken()], [error]
    await pull(link)
    assert link.transport == "slow"
    assert roads.counted == (0, 1)
    await link.close()
    roads.assert_all_closed()


async def test_when_nobody_can_be_reached_the_first_error_comes_out(roads: Roads) -> None:
    link = await roads.open()
    roads.fast.reads, roads.fast.connects = [broken(1)], [broken(2)]
    roads.slow.connects = [broken(3)]
    with pytest.raises(PeerLost, match=r"^break 1$"):
        await pull(link)
    await link.close()
    roads.assert_all_closed()


@pytest.mark.parametrize("error", [StaleTicket, TicketInvalid, StaleIncarnation, AccessDenied])
async def test_a_refusal_is_not_retried(roads: Roads, error: type[PdserveError]) -> None:
    link = await roads.open()
    roads.fast.reads = [error("no")]
    with pytest.raises(error):
        await pull(link)
    assert len(roads.channels) == 1
    assert roads.counted == (0, 0)
    await link.close()
    roads.assert_all_closed()


async def test_moving_on_is_bounded_by_the_pulls_deadline(roads: Roads) -> None:
    link = await roads.open()
    roads.fast.reads = [broken()]
    roads.fast.connects = roads.slow.connects = [asyncio.Event()] * 2  # never
    with pytest.raises(TransferTimeout, match=r"longer than 0\.05 s"):
        await pull(link, timeout_s=0.05)
    roads.fast.connects.clear()
    await pull(link)
    await link.close()
    roads.assert_all_closed()


# ---- several reads at once ---------------------------------------------------------------------


async def test_two_reads_that_break_at_once_reconnect_once(roads: Roads) -> None:
    link = await roads.open()
    roads.fast.reads = [broken(), broken()]
    await asyncio.gather(pull(link), pull(link))
    assert (len(roads.fast.channels), len(roads.slow.channels)) == (2, 0)
    assert roads.counted == (2, 0)
    await link.close()
    roads.assert_all_closed()


async def test_reads_of_a_host_that_vanished_do_not_wait_for_each_other(roads: Roads) -> None:
    link = await roads.open(reconnect_s=0.05)
    never = asyncio.Event()
    roads.fast.reads = [broken(n) for n in range(8)]
    roads.fast.connects, roads.slow.connects = [never] * 8, [never] * 8
    ends = await asyncio.gather(*(pull(link) for _ in range(8)), return_exceptions=True)
    assert sorted(map(str, ends)) == [f"break {n}" for n in range(8)]
    # Tried by the first, and once more for all those that broke when it had begun already.
    assert (len(roads.fast.connects), len(roads.slow.connects)) == (6, 6)
    roads.fast.connects.clear()
    await pull(link)  # whoever comes later tries again
    assert link.transport == "fast"
    await link.close()
    roads.assert_all_closed()


async def test_a_read_that_has_more_to_try_is_not_stopped_by_one_that_had_less(
    roads: Roads,
) -> None:
    link = await roads.open()
    breaks = [asyncio.Event() for _ in range(3)]
    roads.fast.reads = [broken(1), broken(2)]
    roads.slow.reads = [broken(3), *((event, broken(4)) for event in breaks)]
    spent = asyncio.create_task(pull(link))  # when it breaks once more, there is nothing left
    await settled()
    first, last = [asyncio.create_task(pull(link)) for _ in range(2)]
    await settled()
    gives_up = asyncio.Event()
    roads.slow.connects, roads.fast.connects = [(gives_up, broken(5))], [broken(6)]
    for event in (breaks[1], breaks[0], breaks[2]):  # the first moves, and the others wait for it
        event.set()
        await settled()
    gives_up.set()
    with pytest.raises(PeerLost, match=r"^break 1$"):
        await spent
    with pytest.raises(PeerLost, match=r"^break 4$"):
        await first
    await last
    assert link.transport == "slow"
    await link.close()
    roads.assert_all_closed()


async def test_a_channel_is_closed_when_its_last_read_has_ended(roads: Roads) -> None:
    link = await roads.open()
    may_end = asyncio.Event()
    roads.fast.reads = [may_end, broken()]
    slower = asyncio.create_task(pull(link))
    await settled()
    await pull(link)
    first, second = roads.fast.channels
    assert (first.in_flight, first.num_closes) == (1, 0)
    may_end.set()
    await slower
    await settled()
    assert (first.num_closes, second.num_closes) == (1, 0)
    await link.close()
    roads.assert_all_closed()


async def test_a_road_that_another_read_took_meanwhile_is_closed_when_it_is_left(
    roads: Roads,
) -> None:
    """A read that has done with a transport leaves it, though others have just gone back to it."""
    link = await roads.open()
    may_break = asyncio.Event()
    roads.fast.reads = [broken(1), broken(2)]
    roads.slow.reads = [(may_break, broken(5))]
    doomed = asyncio.create_task(pull(link))  # waits on "slow", with "fast" behind it
    await settled()
    assert link.transport == "slow"
    roads.slow.reads = [broken(3), broken(4)]
    await pull(link)  # breaks twice on "slow", so the link goes back to "fast"
    assert link.transport == "fast"
    may_break.set()
    await doomed  # moves the link to "slow" once more: it has had enough of "fast"
    assert link.transport == "slow"
    await link.close()
    roads.assert_all_closed()


# ---- closing -----------------------------------------------------------------------------------


async def test_closing_during_a_move(roads: Roads) -> None:
    link = await roads.open()
    never = asyncio.Event()
    roads.fast.reads, roads.fast.connects = [broken()], [never]
    task = asyncio.create_task(pull(link))
    await settled()
    assert not task.done()
    await link.close()
    with pytest.raises(TransferCancelled, match="closed during the pull"):
        await task
    roads.assert_all_closed()
    with pytest.raises(TransferCancelled):
        await pull(link)


async def test_closing_as_the_move_succeeds(roads: Roads) -> None:
    link = await roads.open()
    connected = asyncio.Event()
    roads.fast.reads, roads.fast.connects = [broken()], [connected]
    task = asyncio.create_task(pull(link))
    await settled()
    connected.set()
    await asyncio.gather(link.close(), link.close())
    await asyncio.wait([task])
    assert isinstance(task.exception(), TransferCancelled | None)
    roads.assert_all_closed()


async def test_closing_ends_every_pull_that_waits_for_a_move(roads: Roads) -> None:
    link = await roads.open()
    roads.fast.reads, roads.fast.connects = [broken()] * 5, [asyncio.Event()]
    tasks = [asyncio.create_task(pull(link)) for _ in range(5)]
    await settled()
    await link.close()
    for task in tasks:
        with pytest.raises(TransferCancelled):
            await task
    roads.assert_all_closed()


OUTCOMES = st.lists(st.sampled_from(["well", "break", "refuse"]), max_size=12)


@settings(max_examples=examples(150))
@given(
    st.tuples(OUTCOMES, OUTCOMES),
    st.tuples(OUTCOMES, OUTCOMES),
    st.lists(st.integers(0, 12), min_size=1, max_size=6),  # steps between the pulls
    st.none() | st.integers(0, 40),  # steps until the link is closed
)
def test_whatever_breaks_no_channel_is_left_or_used_after_its_end(
    reads: tuple[list[str], list[str]],
    connects: tuple[list[str], list[str]],
    starts: list[int],
    close_after: int | None,
) -> None:
    async def scenario() -> None:
        roads = Roads()
        link = await roads.open()
        for transport, its_reads, its_connects in zip(
            (roads.fast, roads.slow), reads, connects, strict=True
        ):
            transport.reads = errors_of(its_reads, StaleTicket("stale"))
            transport.connects = errors_of(its_connects, AccessDenied("no"))
        tasks = []
        for steps in starts:
            tasks.append(asyncio.create_task(pull(link)))
            for _ in range(steps):
                await asyncio.sleep(0)
        if close_after is not None:
            for _ in range(close_after):
                await asyncio.sleep(0)
            await link.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, PeerLost | StaleTicket | TransferCancelled)
        await link.close()
        roads.assert_all_closed()

    asyncio.run(scenario())


def errors_of(outcomes: Sequence[str], refusal: PdserveError) -> list[Outcome]:
    errors: dict[str, Outcome] = {"well": None, "break": broken(), "refuse": refusal}
    return [errors[outcome] for outcome in outcomes]


# ---- which one, and why ------------------------------------------------------------------------


async def test_the_better_one_is_not_offered(roads: Roads) -> None:
    roads.offers = [TransportOffer(name="slow"), TransportOffer(name="unheard of")]
    link = await roads.open()
    assert (link.transport, link.reason) == ("slow", "fast: not offered")
    await link.close()


async def test_the_exporter_cannot_serve_the_better_one(roads: Roads) -> None:
    offer = TransportOffer(name="fast", unavailable="no such card")
    roads.offers = [TransportOffer(name="slow"), offer]
    link = await roads.open()
    assert (link.transport, link.reason) == ("slow", "fast: p0 cannot: no such card")
    await link.close()


async def test_the_better_one_cannot_work_between_these_two(roads: Roads) -> None:
    roads.fast.impossible = "another host"
    link = await roads.open()
    assert (link.transport, link.reason) == ("slow", "fast: another host")
    await link.close()


async def test_a_worse_one_that_does_not_work_is_no_reason(roads: Roads) -> None:
    roads.offers = [TransportOffer(name="fast")]
    link = await roads.open()
    assert (link.transport, link.reason) == ("fast", "the best transport there is")
    await link.close()


async def test_without_any_every_reason_is_told(roads: Roads) -> None:
    roads.offers = [TransportOffer(name="fast", unavailable="no such card")]
    with pytest.raises(PeerLost, match="fast: p0 cannot: no such card; slow: not offered"):
        await roads.open()


async def test_a_transport_that_comes_back_is_no_reason_any_more(roads: Roads) -> None:
    roads.fast.connects = [broken(1)]
    link = await roads.open()
    assert (link.transport, link.reason) == ("slow", "fast: break 1")
    roads.slow.reads = [broken(2), broken(3)]
    await pull(link)
    assert (link.transport, link.reason) == ("fast", "the best transport there is")
    await link.close()
    roads.assert_all_closed()
