"""A stream that resumes and moves, searched to the last; and protocols that are wrong, found.

What is searched: one stream, two nodes and their coordinator; every order of steps, prefetches,
copies, takeovers, tokens, crashes, nodes taken for lost that go on, refusals, restarts and cancels,
while other requests come and go. Nothing wrong is ever read as KV, every token is shown once and in
order, nobody emits beside the stream's owner without being told, every block comes back.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.matrix import matrix
from tests.model.search import Search
from tests.model.streams.rules import StreamRules
from tests.model.streams.world import Config, Mutation
from tests.model.world import Violation

WORLDS = [
    Config("messages arrive in any order, and a node is lost", crashes=1),
    Config("the stream is taken over, and a node is lost", takeovers=1, crashes=1, in_order=True),
    Config("the stream moves, and a node is lost", moves=1, crashes=1, in_order=True),
    Config("messages arrive in any order, and a node that is not lost is taken for it", cuts=1),
    Config("messages arrive in any order, and the stream moves", moves=1, cancels=True),
    Config("a node and its replacement are lost", crashes=2, in_order=True),
    Config("the stream moves, and a node refuses it", moves=1, refusals=1, in_order=True),
    Config("the stream moves, and a node is taken for lost", moves=1, cuts=1, in_order=True),
    Config("messages arrive in any order, and the stream is taken over", takeovers=1, cancels=True),
    Config("the stream is taken over, and a node refuses", takeovers=1, refusals=1),
    Config("the stream is taken over again and again", takeovers=2, in_order=True),
    Config("the stream is taken over, and a node cut off", takeovers=1, cuts=1, in_order=True),
]

CASES = {
    Mutation.SAME_ATTEMPT: (Config("", cuts=1), "a token of node 0 is shown"),
    Mutation.ANY_ATTEMPT: (Config("", moves=1), "a token of node 0 is shown"),
    Mutation.SHOWN_AS_THEY_COME: (Config(""), "token 1 is shown after 0"),
    Mutation.RESUMED_AFTER_GAP: (Config("", crashes=1), "token 1 is shown after 0"),
    Mutation.NO_BUMP: (Config("", moves=1, in_order=True), "holds a wrong block"),
    Mutation.COMPARE_FIRST: (Config("", moves=1, in_order=True), "holds a wrong block"),
    Mutation.HALF_BLOCK: (Config("", moves=1, in_order=True), "holds a wrong block"),
    Mutation.FREED_IN_STEP: (Config("", moves=1), "writes to a free block"),
    Mutation.NO_LEASE: (Config("", moves=1, crashes=1, in_order=True), "never come back"),
    Mutation.SOURCE_GOES_ON: (Config("", moves=1), "goes on with attempt 0, which is not wanted"),
    Mutation.BACK_TO_SOURCE: (Config("", moves=1, refusals=1, in_order=True), "never come back"),
    Mutation.LOST_IF_REFUSED: (Config("", moves=1, refusals=1, in_order=True), "never come back"),
    Mutation.CUT_UNNOTICED: (Config("", cuts=1), "goes on with attempt 0, which is not wanted"),
    Mutation.LATE_PREFETCHED: (
        Config("", moves=1, crashes=1, in_order=True),
        "still counts as interrupted",
    ),
    Mutation.TAKEN_IN_STEP: (Config("", takeovers=1, in_order=True), "reads wrong KV"),
    Mutation.END_UNTOLD: (Config("", takeovers=1, in_order=True), "never come back"),
    Mutation.END_UNHEEDED: (Config("", takeovers=1, in_order=True), "never come back"),
    Mutation.USED_AGAIN: (Config("", takeovers=2, refusals=1), "a token of node 1 is shown"),
}


@pytest.mark.parametrize("config", matrix(WORLDS, 2), ids=lambda config: config.name)
def test_a_stream_goes_on_wherever_it_is(config: Config) -> None:
    assert Search(StreamRules(config)).run().num_worlds > 200, "hardly anything can happen"


def test_every_mutation_has_a_case() -> None:
    assert set(CASES) == set(Mutation)


@pytest.mark.parametrize("mutation", matrix(CASES, 4), ids=lambda mutation: mutation.name)
def test_a_wrong_protocol_is_found(mutation: Mutation) -> None:
    config, what = CASES[mutation]
    with pytest.raises(Violation, match=what) as violation:
        Search(StreamRules(replace(config, name=mutation.name, mutation=mutation))).run()
    assert "\n  1. " in str(violation.value), "it tells how it came to it"
