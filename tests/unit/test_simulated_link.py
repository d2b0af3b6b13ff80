"""Simulated links: their arithmetic, their settings, and messages that come late but in order."""

from __future__ import annotations

import asyncio
from math import inf, sqrt

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.node.sessions.delayed import Delayed
from pdserve.protocol import Settle
from pdserve.settings.config import HandoffConfig
from pdserve.shared.simulated_link import Carrier, SimulatedLink, link_between, parse_link

SLOW = SimulatedLink(bandwidth=1000.0, delay=0.5)


def test_a_read_takes_a_round_trip_and_its_bytes() -> None:
    assert Carrier(SLOW).arrival_s(2000, 10.0) == 10.0 + 0.5 + 2.0 + 0.5
    assert Carrier(SimulatedLink(delay=0.5)).arrival_s(2000, 10.0) == 11.0


def test_reads_share_the_bandwidth_in_order() -> None:
    carrier = Carrier(SLOW)
    assert [carrier.arrival_s(1000, 0.0) for _ in range(3)] == [2.0, 3.0, 4.0]
    assert carrier.arrival_s(1000, 100.0) == 102.0, "what was not used is not saved up"


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10_000)), max_size=20))
def test_no_link_carries_more_than_it_can(reads: list[tuple[float, int]]) -> None:
    carrier, first = Carrier(SLOW), min((at for at, _ in reads), default=0.0)
    arrivals = [carrier.arrival_s(num_bytes, at) for at, num_bytes in sorted(reads)]
    assert arrivals == sorted(arrivals)
    total = sum(num_bytes for _, num_bytes in reads)
    assert not arrivals or arrivals[-1] >= first + 2 * SLOW.delay + total / SLOW.bandwidth - 1e-9


def test_lost_packets_cost_bandwidth_by_the_round_trip() -> None:
    near, far = (SimulatedLink(delay=delay, loss=0.01) for delay in (0.001, 0.1))
    assert near.bytes_per_s == pytest.approx(100 * far.bytes_per_s)
    assert far.bytes_per_s == pytest.approx(1448 / 0.2 * sqrt(1.5 / 0.01))
    assert SimulatedLink(bandwidth=10.0, delay=0.1, loss=0.01).bytes_per_s == 10.0


def test_the_first_link_that_fits_is_taken() -> None:
    links = [
        parse_link("prefill-* decode-1 bandwidth=1e6"),
        parse_link("* decode-* delay=0.02 loss=1e-4"),
    ]
    assert link_between(links, "prefill-0", "decode-1") is links[0]
    assert link_between(links, "decode-0", "decode-1") is links[1]
    assert link_between(links, "decode-0", "prefill-0") is None
    assert links[0] == SimulatedLink("prefill-*", "decode-1", 1e6, 0.0, 0.0)
    assert links[1] == SimulatedLink("*", "decode-*", inf, 0.02, 1e-4)
    assert parse_link("* * delay=1 raw") == SimulatedLink(delay=1, is_raw=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "should be as in"),
        ("prefill-0 decode-0", "should be as in"),
        ("delay=1 loss=0.1", "should be as in"),
        ("* * delay=1 delay=2", "'delay=2' is wrong"),
        ("* * speed=1", "'speed=1' is wrong"),
        ("* * raw", "should be as in"),
        ("* * bandwidth=0", "needs bandwidth > 0"),
        ("* * delay=1 loss=1", "loss from 0 to less than 1"),
        ("* * loss=0.1", "give a delay"),
    ],
)
def test_what_is_no_link_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        HandoffConfig(links=[text])


async def test_messages_are_late_and_in_order() -> None:
    received: list[msgspec.Struct] = []
    all_here = asyncio.Event()

    def receive(message: msgspec.Struct) -> None:
        received.append(message)
        if len(received) == 3:
            all_here.set()

    sent = [Settle(subscription_id=str(i), pulled=True) for i in range(3)]
    late = Delayed(receive, 0.02)
    began_s = asyncio.get_running_loop().time()
    for message in sent:
        late.send(message)
    await asyncio.sleep(0)
    assert not received
    async with asyncio.timeout(30):
        await all_here.wait()
    assert received == sent
    assert asyncio.get_running_loop().time() >= began_s + 0.02
