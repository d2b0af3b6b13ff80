"""The search can fail: it finds every protocol that is wrong in one place, and tells how."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.matrix import matrix
from tests.model.pair_rules import PairRules
from tests.model.search import Search
from tests.model.world import Config, Mutation, Violation

WRONG_BYTES = r"block \d of \d was adopted, and holds"

CASES = {
    Mutation.NO_BUMP: (Config(""), WRONG_BYTES),
    Mutation.BUMP_AFTER_REUSE: (Config(""), WRONG_BYTES),
    Mutation.ONE_BIT_GENERATIONS: (Config(""), WRONG_BYTES),
    Mutation.COMPARE_FIRST: (Config(""), WRONG_BYTES),
    Mutation.FREE_IN_FLIGHT: (Config(""), WRONG_BYTES),
    Mutation.FORMER_LIVES: (Config("", exporter_crashes=1), WRONG_BYTES),
    Mutation.IDS_AGAIN: (Config("", in_order=True), "a settle of a former attempt"),
    Mutation.NO_REFERENCE: (Config(""), "block 1 is freed twice"),
    Mutation.PULL_OVER_PREFIX: (Config("", shares_prefix=True), "that is valid was to pull"),
    Mutation.NO_LEASE: (
        Config("", puller_crashes=1, in_order=True, coordinator=False, cancels=False),
        "blocks never come back",
    ),
    Mutation.ADOPT_UNREAD: (Config(""), "that is pulling was to adopt"),
}


def test_every_mutation_has_a_case() -> None:
    assert set(CASES) == set(Mutation)


@pytest.mark.parametrize("mutation", matrix(CASES, 2), ids=lambda mutation: mutation.name)
def test_a_wrong_protocol_is_found(mutation: Mutation) -> None:
    config, what = CASES[mutation]
    with pytest.raises(Violation, match=what) as violation:
        Search(PairRules(mutated(config, mutation))).run()
    assert "\n  1. " in str(violation.value), "it tells how it came to it"


def mutated(config: Config, mutation: Mutation) -> Config:
    return replace(config, name=mutation.name, mutation=mutation)
