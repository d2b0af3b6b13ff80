"""The text of GET /metrics: however often it is asked for, the event loop has time for the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest

from pdserve.metrics import CoordinatorMetrics
from pdserve.shared.prometheus.exposition import SHARE, Exposition

NUM_PIECES = 5


class Source:
    """Pieces that count how often they are made, and what the loop did between them."""

    def __init__(self) -> None:
        self.num_made = 0
        self.num_turns = 0
        self.turns: list[int] = []  # in which turn of the loop each piece was made

    def pieces(self) -> Iterator[bytes]:
        self.num_made += 1
        for number in range(NUM_PIECES):
            self.turns.append(self.num_turns)
            yield b"%d.%d\n" % (self.num_made, number)

    async def count_turns(self) -> None:
        while True:
            self.num_turns += 1
            await asyncio.sleep(0)


async def test_each_piece_has_a_turn_of_the_loop_of_its_own() -> None:
    source = Source()
    counting = asyncio.create_task(source.count_turns())
    text = await Exposition(source.pieces).text()
    counting.cancel()
    assert text == b"1.0\n1.1\n1.2\n1.3\n1.4\n"
    assert len(set(source.turns)) == NUM_PIECES


async def test_a_flood_costs_two_texts_of_which_the_second_is_news_to_all() -> None:
    source = Source()
    exposition = Exposition(source.pieces)
    first = asyncio.create_task(exposition.text())
    while source.num_made == 0:
        await asyncio.sleep(0)
    flood = [asyncio.create_task(exposition.text()) for _ in range(1000)]
    flood[0].cancel()  # whoever leaves is in nobody's way
    texts = await asyncio.gather(*flood[1:])
    assert (await first).startswith(b"1.")
    assert set(texts) == {b"2.0\n2.1\n2.2\n2.3\n2.4\n"}, "nobody gets what was begun before"
    assert source.num_made == 2


async def test_between_two_texts_the_loop_has_its_time_for_itself() -> None:
    seconds = iter(range(100))
    rests: list[float] = []

    async def rest(delay_s: float) -> None:
        rests.append(delay_s)

    exposition = Exposition(Source().pieces, now=lambda: float(next(seconds)), sleep=rest)
    await exposition.text()
    before = len(rests)
    await exposition.text()
    assert max(rests[:before]) <= 0.0
    work_s = NUM_PIECES + 1  # by this clock: a second for each piece, and to see that it was all
    assert rests[before] == pytest.approx(work_s * (1 / SHARE - 1) - 1)


async def test_a_failed_text_fails_those_who_asked_for_it_and_no_others() -> None:
    source = Source()

    def pieces() -> Iterator[bytes]:
        yield from source.pieces()
        if source.num_made == 1:
            raise ValueError("an odd fault")

    exposition = Exposition(pieces)
    (error,) = await asyncio.gather(exposition.text(), return_exceptions=True)
    assert isinstance(error, ValueError)
    assert await exposition.text()


async def test_the_pieces_are_the_whole_text() -> None:
    metrics = CoordinatorMetrics()
    pieces = list(metrics.pieces())
    assert max(map(len, pieces)) < sum(map(len, pieces)) / 5
    text = (await Exposition(metrics.pieces).text()).decode()
    assert set(map(str.strip, text.splitlines())) >= {"# TYPE pdserve_requests_total counter"}
    at_once = generate_latest(metrics.registry).decode()
    assert sorted(map(_name, text.splitlines())) == sorted(map(_name, at_once.splitlines()))


def _name(line: str) -> str:
    """Without the value: resident memory may have changed."""
    return line if line.startswith("#") else line.rsplit(" ", 1)[0]
