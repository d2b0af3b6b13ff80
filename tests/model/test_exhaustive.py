"""Small worlds, searched to the last: nothing wrong is ever read, and every block comes back.

What is searched: one exporter and one puller, two lives of each, two requests of two blocks, three
blocks in each pool; every order of starting, computing, announcing, hearing, pulling block by
block, comparing, adopting, settling, cancelling, failing, crashing and restarting, while other
requests come and go. Each world turns on what it is named for.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import cache

import pytest

from kv_transfer.lifecycle import EXPORTER_MOVES, PULLER_MOVES
from tests.matrix import matrix
from tests.model.pair_rules import PairRules
from tests.model.search import Found, Search
from tests.model.world import Config, Violation

WORLDS = [
    Config("the puller crashes", puller_crashes=1, cancels=False),
    Config("messages come late, twice and in any order", duplicates=True),
    Config("the exporter crashes", exporter_crashes=1),
    Config(
        "both crash, and no coordinator cancels anything",
        exporter_crashes=1,
        puller_crashes=1,
        in_order=True,
        coordinator=False,
        cancels=False,
    ),
    Config("there is no coordinator", in_order=True, coordinator=False),
    Config("prompts share a prefix", shares_prefix=True),
    Config("prompts are computed in chunks", chunks=(1, 1)),
    Config(
        "chunks are announced layer by layer, and tickets are renewed",
        num_layers=2,
        renews=True,
        in_order=True,
        cancels=False,
    ),
    Config(
        "what was not pulled is computed",
        chunks=(1, 1),
        recomputes=True,
        num_own_blocks=1,
        in_order=True,
    ),
]


@cache
def search(config: Config) -> tuple[Found, set[tuple[Enum, Enum]]]:
    """What was seen, and which rows of the tables were needed."""
    rules = PairRules(config)
    return Search(rules).run(), rules.rows_used


@pytest.mark.parametrize("config", matrix(WORLDS, 1), ids=lambda config: config.name)
def test_nothing_wrong_is_read_and_every_block_comes_back(
    config: Config, record_property: Callable[[str, object], None]
) -> None:
    found, _ = search(config)
    record_property("worlds", found.num_worlds)
    record_property("moves", found.num_moves)
    assert found.num_worlds > 1000, "hardly anything can happen in this world"


@pytest.mark.long
def test_every_legal_move_is_made_somewhere() -> None:
    """A row of the tables that nothing needs allows what nobody has thought of."""
    used: set[tuple[Enum, Enum]] = set()
    for config in WORLDS:
        used |= search(config)[1]
    assert used == {*EXPORTER_MOVES, *PULLER_MOVES}


@pytest.mark.long
def test_sessions_must_keep_the_order_of_messages() -> None:
    """They do: a session is one stream. Else only the coordinator would get these blocks back."""
    with pytest.raises(Violation, match=r"SETTLE of 0\n.*SUBSCRIBE of 0\n.*never come back"):
        search(Config("a bag of messages, and no coordinator", coordinator=False))
