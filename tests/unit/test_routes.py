"""Classifiers of `pdserve route`: what they learn, how they are judged, and what damages a file."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from pdserve.commands.cli.main import main
from pdserve.commands.cli.routes.fit import WITHIN, judged, trained
from pdserve.measured.routes import (
    MOST_TOKENS,
    NUM_SLOTS,
    Outcome,
    OutcomesHeader,
    RouteClassifier,
    read_classifier,
    slots_of,
    write_classifier,
)
from pdserve.shared.errors import ConfigError

TIERS = ["small", "large"]


def outcomes(num: int, seed: int = 0) -> list[Outcome]:
    """Prompts with the token 7 are too hard for the small one; costs are 1 and 3."""
    rng = random.Random(seed)
    found = []
    for _ in range(num):
        prompt = [rng.randrange(10, 60) for _ in range(rng.randrange(3, 12))]
        is_hard = rng.random() < 0.4
        if is_hard:
            prompt[rng.randrange(len(prompt))] = 7
        quality = [0.0 if is_hard else 1.0, 1.0]
        found.append(Outcome(prompt=prompt, quality=quality, cost=[1.0, 3.0]))
    return found


@pytest.fixture(scope="module")
def classifier() -> RouteClassifier:
    return trained(TIERS, outcomes(600))


def test_what_is_too_hard_is_learned(classifier: RouteClassifier) -> None:
    found = judged(classifier, outcomes(200, seed=1)).classified
    share = sum(7 in one.prompt for one in outcomes(200, seed=1)) / 200
    assert found.skipped == pytest.approx(share, abs=0.03)
    assert found.quality >= 1 - 2 * WITHIN
    assert found.cost == pytest.approx((share * 3 + (1 - share) * 1) / 3, abs=0.03)


def test_held_out_quality_is_in_the_file(classifier: RouteClassifier) -> None:
    held = classifier.held_out
    assert (held.large.quality, held.large.cost, held.large.skipped) == (1.0, 1.0, 1.0)
    assert held.cascade.skipped == 0.0
    assert held.cascade.quality < held.classified.quality
    assert held.classified.quality >= held.large.quality - WITHIN
    assert held.classified in held.curve
    assert 100 <= held.large.num <= 140, "a fifth"


def test_the_same_outcomes_give_the_same_file(classifier: RouteClassifier) -> None:
    assert trained(TIERS, outcomes(600)) == classifier


def test_an_answer_that_others_rules_keep_costs_one_tier() -> None:
    kept = Outcome(prompt=[1], kept=True, quality=[0.5, 1.0], cost=[1.0, 3.0])
    lost = replace(kept, kept=False)
    assert [one.quality_if(skips=False) for one in (kept, lost)] == [0.5, 1.0]
    assert [one.cost_if(skips=False) for one in (kept, lost)] == [1.0, 4.0]
    assert {one.cost_if(skips=True) for one in (kept, lost)} == {3.0}


def test_slots_are_those_of_the_last_tokens() -> None:
    slots = slots_of([5, 6])
    assert slots.size == 3, "two tokens and a pair"
    assert slots_of([5, 6]).tolist() == slots.tolist() == sorted(set(slots.tolist()))
    assert slots_of([6, 5]).tolist() != slots.tolist()
    assert slots.max() < NUM_SLOTS
    long = list(range(4 * MOST_TOKENS))
    assert slots_of(long).tolist() == slots_of(long[-MOST_TOKENS:]).tolist()


def test_what_is_asked_of_a_prompt_is_bounded(classifier: RouteClassifier) -> None:
    """Work, and not seconds: n-grams of at most so many tokens, however long the prompt."""
    assert slots_of(list(range(10**6))).size <= 3 * MOST_TOKENS
    assert 0 <= classifier.probability(list(range(10**5))) <= 1


def test_a_file_is_read_as_it_was_written(tmp_path: Path, classifier: RouteClassifier) -> None:
    write_classifier(classifier, tmp_path / "route.json")
    assert read_classifier(tmp_path / "route.json") == classifier


def test_a_wrong_file_gets_one_line(tmp_path: Path, classifier: RouteClassifier) -> None:
    path = tmp_path / "route.json"
    cases = {
        "version 9, and this pdserve reads version 1": replace(classifier, version=9),
        "is damaged": replace(classifier, weights=b"\0" * len(classifier.weights)),
        "damaged: make it anew": replace(classifier, threshold=classifier.threshold / 2),
    }
    for said, written in cases.items():
        path.write_bytes(msgspec.json.encode(written))
        with pytest.raises(ConfigError, match=said):
            read_classifier(path)
    path.write_bytes(msgspec.json.encode(classifier)[:-9])
    with pytest.raises(ConfigError, match=r"is not a classifier of `pdserve route`"):
        read_classifier(path)
    with pytest.raises(ConfigError, match="cannot read the classifier"):
        read_classifier(tmp_path / "none.json")


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def written(name: str, found: list[Outcome], tiers: list[str] = TIERS) -> str:
        lines = [msgspec.json.encode(one) for one in (OutcomesHeader(tiers=tiers), *found)]
        (tmp_path / name).write_bytes(b"\n".join(lines))
        return str(tmp_path / name)

    file = str(tmp_path / "route.json")
    fitted, others = written("a", outcomes(300)), written("b", outcomes(100, seed=2))
    assert main(["route", "train", fitted, "--output", file]) == 0
    assert (tmp_path / "route.png").read_bytes().startswith(b"\x89PNG")
    assert "threshold 0." in capsys.readouterr().out
    assert main(["route", "evaluate", file, others]) == 0
    said = capsys.readouterr().out
    assert "100 outcomes that were not fitted" in said
    assert "with the classifier" in said
    for words, wrong in (
        (["evaluate", file, written("c", outcomes(9), ["a", "b"])], "fitted to the tiers small"),
        (["train", written("d", outcomes(9))], "9 outcomes are too few"),
        (["train", written("e", [])], "has no outcomes"),
        (["train", file], "line 1 is no line of outcomes"),
    ):
        assert main(["route", *words]) != 0
        error = capsys.readouterr().err
        assert wrong in error
        assert error.count("\n") == 1
