"""`pdserve bench drafts`: its texts, its figures, and a whole run on a model of no size."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from pdserve.commands.bench.checkpoints.random_checkpoint import write_random_checkpoint
from pdserve.commands.bench.drafts.config import TextSet
from pdserve.commands.bench.drafts.measurement import lookup, median_interval
from pdserve.commands.bench.drafts.streams import Streams
from pdserve.commands.bench.drafts.texts import make_texts
from pdserve.commands.cli.main import main
from pdserve.engine.drafts.speculation import Speculation
from pdserve.engine.drafts.texts import FormerAnswers, OwnText
from pdserve.engine.interface import Sampled
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import SampledToken, Scheduled
from pdserve.measured.perf_model import PerfModel
from tests.matrix import matrix
from tests.unit.commands.bench.checkpoints.test_random_checkpoint import TINY


def encode(text: str) -> list[int]:
    return list(text.encode())


def in_words(text: str) -> list[int]:
    """As few tokens as a large vocabulary makes of it, so that long functions fit."""
    return [len(word) + 100 * ord(word[0]) for word in text.split()]


@pytest.mark.parametrize("name", matrix(get_args(TextSet), 1))
def test_each_set_is_the_same_each_time(name: TextSet) -> None:
    made = make_texts(name, in_words, 32_000, 12, 16)
    assert made == make_texts(name, in_words, 32_000, 12, 16)
    assert all(len(text.answer) == 16 and text.prompt for text in made)
    assert len({tuple(text.prompt) for text in made}) > 6


@pytest.mark.parametrize("name", ["summaries", "edits", "retrieval"])
def test_answers_are_mostly_in_their_prompts(name: TextSet) -> None:
    for text in make_texts(name, in_words, 0, 12, 24):
        known = Counter(zip(text.prompt, text.prompt[1:], strict=False))
        pairs = list(zip(text.answer, text.answer[1:], strict=False))
        assert sum(pair in known for pair in pairs) > 0.3 * len(pairs), name


def test_the_interval_is_narrow_only_with_many_rounds() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([float(n) for n in range(6)]) == (0.0, 5.0)
    assert median_interval([float(n) for n in range(20)]) == (5.0, 14.0)


class SaysNothing:
    """A runner that draws a token of its own for each row and each draft."""

    launcher = None
    model_s = 0.0

    def prepare(self, rows: list[Scheduled], progress: object = None):
        def compute() -> Sampled:
            return [
                SampledToken(7, after=(SampledToken(7),) * len(row.request.draft))
                if row.samples
                else None
                for row in rows
            ]

        return compute

    def foresee(self, rows: list[Scheduled]) -> None:
        """Nothing to prepare."""


def test_answers_are_played_token_by_token_with_drafts_and_without() -> None:
    texts = make_texts("edits", encode, 256, 4, 200)
    pool, perf = BlockPool(2000, 16), PerfModel()
    streams = Streams(SaysNothing(), pool, perf, plays=True)
    speculation = Speculation(pool, lambda shape: 1.0, 64, [OwnText()])
    answers = [text.answer for text in texts]
    off, on = (streams.decode(texts, 200, speculate) for speculate in (None, speculation))
    assert off.answers == on.answers == answers
    assert off.num_tokens == on.num_tokens == 4 * 199  # token 1 comes with the prompt
    assert on.num_steps < off.num_steps == 199
    assert speculation.counts["text"].accepted > 0


def test_agents_that_try_again_are_helped_by_what_was_said() -> None:
    texts = make_texts("agents", encode, 256, 2, 200)
    pool, perf = BlockPool(2000, 16), PerfModel()
    streams = Streams(SaysNothing(), pool, perf, plays=True, tenant="agents")
    speculation = Speculation(pool, lambda shape: 1.0, 64, [FormerAnswers()])
    first, again = (streams.decode(texts, 200, speculation) for _ in range(2))
    assert first.answers == again.answers
    assert again.num_steps < 0.3 * first.num_steps


def test_a_look_is_timed_and_memory_is_counted() -> None:
    ticks = iter(range(10_000))
    short, long = (lookup(n, lambda: float(next(ticks))) for n in (100, 10_000))
    assert short.look_us == long.look_us == pytest.approx(1e6)
    assert long.bytes > short.bytes


@pytest.mark.usefixtures("cores")
def test_a_run_compares_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_random_checkpoint(tmp_path / "tiny", shape=TINY)
    flags = [f"--shape={folder}", "--threads=1", "--batches=1,3", "--rounds=2", "--tokens=12"]
    flags += ["--texts=retrieval,agents,random", "--histories=100", "--profile=off", "--json"]
    assert main(["bench", "drafts", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = report["rows"]
    texts = ["retrieval", "agents", "random"]
    assert [(row["texts"], row["batch"]) for row in rows] == [(t, b) for t in texts for b in (1, 3)]
    assert {row["answers"] for row in rows} == {"own"}
    assert all(row["interval"][0] <= row["ratio"] <= row["interval"][1] for row in rows)
    assert report["lookups"][0]["history"] == 100
