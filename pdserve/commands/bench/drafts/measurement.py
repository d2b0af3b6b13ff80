"""Tokens a second with drafts and without, in turns, and what a look for a draft costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import msgspec

from pdserve.commands.bench.drafts.config import TextSet
from pdserve.commands.bench.drafts.streams import Decoded, Streams, new_request
from pdserve.commands.bench.drafts.texts import Text, random_text
from pdserve.engine.drafts.speculation import MOST_OF_STREAM, Speculation
from pdserve.engine.drafts.texts import OwnText
from pdserve.shared.errors import PdserveError

_INTERVAL = 0.95
_NUM_LOOKS, _FEW_IDS = 2000, 8


class DraftsRow(msgspec.Struct, frozen=True, kw_only=True):
    """A set of texts at one batch size."""

    model: str
    texts: TextSet
    answers: str  # "played" from the texts, or the model's "own"
    batch: int
    off_tokens_per_s: float  # median of the rounds
    on_tokens_per_s: float
    ratio: float  # median of the rounds' ratios
    interval: tuple[float, float]  # of this median, 95 %; of fewer than 6 rounds their extremes
    tokens_per_step: float  # of a stream, with drafts
    drafted: int
    accepted: int


class LookupRow(msgspec.Struct, frozen=True):
    """What one stream's drafts cost behind so much text."""

    history: int  # tokens
    look_us: float  # a token is added and a draft looked for; median
    p99_us: float
    bytes: int


class DraftsReport(msgspec.Struct, frozen=True):
    """The results of `pdserve bench drafts`."""

    rows: list[DraftsRow]
    lookups: list[LookupRow]


class Case:
    """One set of texts at one batch size, measured round by round."""

    def __init__(
        self, streams: Streams, texts: Sequence[Text], batch: int, speculation: Speculation
    ) -> None:
        self._streams = streams
        self._texts = texts
        self._batch = batch
        self._speculation = speculation
        self._off: list[Decoded] = []
        self._on: list[Decoded] = []

    def rehearse(self, tokens: int) -> None:
        """Have everything said once before: agents try again."""
        for start in range(0, len(self._texts), self._batch):
            some = self._texts[start : start + self._batch]
            self._streams.decode(some, tokens, self._speculation)

    def round(self, number: int, tokens: int) -> None:
        """Decode the next streams both ways; which is first changes.

        Raises:
            PdserveError: the answers differ.
        """
        texts = self._texts
        some = [texts[(number * self._batch + i) % len(texts)] for i in range(self._batch)]
        if number == 0:
            self._streams.decode(some, 2, None)  # so that all prompts are there
        ways = [(self._off, None), (self._on, self._speculation)]
        for done, speculate in ways[:: 1 if number % 2 else -1]:
            done.append(self._streams.decode(some, tokens, speculate))
        if self._on[-1].answers != self._off[-1].answers:
            raise PdserveError(f"round {number}: drafts have changed an answer")

    def row(self, model: str, name: TextSet, answers: str) -> DraftsRow:
        """What the rounds come to."""
        ratios = [
            on.tokens_per_s / off.tokens_per_s for on, off in zip(self._on, self._off, strict=True)
        ]
        counts = self._speculation.counts.values()
        return DraftsRow(
            model=model,
            texts=name,
            answers=answers,
            batch=self._batch,
            off_tokens_per_s=statistics.median(one.tokens_per_s for one in self._off),
            on_tokens_per_s=statistics.median(one.tokens_per_s for one in self._on),
            ratio=statistics.median(ratios),
            interval=median_interval(ratios),
            tokens_per_step=sum(one.num_tokens for one in self._off)
            / sum(one.num_steps for one in self._on)
            / self._batch,
            drafted=sum(source.drafted for source in counts),
            accepted=sum(source.accepted for source in counts),
        )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the narrowest pair of values, as far from both ends, that covers the median so often.

    It takes nothing of how they are distributed: each is above the median as often as below.
    """
    ordered, number = sorted(values), len(values)
    outside, ways, skipped = 0.0, 1, 0  # chance that the median is beyond the values skipped
    for place in range(number // 2):
        outside += 2 * ways / 2**number
        if outside > 1 - _INTERVAL:
            break
        skipped = place
        ways = ways * (number - place) // (place + 1)
    return ordered[skipped], ordered[-1 - skipped]


def lookup(history: int, timer: Callable[[], float] = time.perf_counter) -> LookupRow:
    """Measure looks for drafts in so much text, of so few ids that there is always a match."""
    text = random_text(0, _FEW_IDS, _NUM_LOOKS, history)
    request = new_request(Text(text.prompt, []), _NUM_LOOKS)
    index = OwnText().drafter(request)
    while len(index) < history:  # a long text is added in slices
        index.propose(request, MOST_OF_STREAM)
    taken_s = []
    for token_id in text.answer:
        request.output_token_ids.append(token_id)
        started_s = timer()
        index.propose(request, MOST_OF_STREAM)
        taken_s.append(timer() - started_s)
    taken_s.sort()
    p99_s = taken_s[int(0.99 * _NUM_LOOKS)]
    return LookupRow(history, 1e6 * statistics.median(taken_s), 1e6 * p99_s, index.num_bytes)
