"""Running figures of a simulation, turned into the score of `pdserve bench compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain

import numpy as np
import numpy.typing as npt

from pdserve.commands.bench.load.outcome import Outcome as Seen
from pdserve.commands.bench.load.outcome import Percentiles, Promise
from pdserve.commands.bench.load.slo_score import Score, TokenFigures, score
from pdserve.commands.simulation.outcome import Outcome
from pdserve.commands.simulation.predict.parts import PhaseTotals

_LEAST_S, _STEP, _NUM_BINS = 1e-6, 1.005, 4200  # gaps from 1 us to 1,000 s, each within 0.5 %
_MOST_TOKENS = 1 << 16  # whose times are kept until they are counted together


class Tally:
    """Collects outcomes. Of a call's tokens it keeps the times of the first and last, and gaps."""

    def __init__(
        self,
        promise: Promise,
        most_late: Mapping[str, float],
        is_hopeless: Callable[[], None],
    ) -> None:
        """
        Args:
            promise: the targets.
            most_late: kind |-> how many requests may miss them, before the target is out of reach.
            is_hopeless: is called once it is.
        """
        self.promise = promise
        self.stopped_early = False
        self.num_cached_tokens = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.phases = PhaseTotals()
        self._most_late = most_late
        self._is_hopeless = is_hopeless
        self._late: Counter[str] = Counter()
        self._seen: list[Seen] = []
        self._uncounted: list[tuple[float, list[float]]] = []  # (arrival, times of its tokens)
        self._num_uncounted = 0  # tokens
        self._num_in_time = 0  # tokens; see Promise.num_in_time
        self._gaps = np.zeros(_NUM_BINS, np.int64)

    def __call__(self, outcome: Outcome) -> None:
        """Note a call that has ended or was refused."""
        seen = self.note(outcome)
        if self.promise.factor(seen) > 1:
            self._late[seen.kind] += 1
            if self._late[seen.kind] > self._most_late[seen.kind] and not self.stopped_early:
                self.stopped_early = True
                self._is_hopeless()

    def note(self, outcome: Outcome) -> Seen:
        """Note a call, which may be unfinished."""
        call, times_s = outcome.call, outcome.token_times_s
        seen = Seen(
            kind=call.kind,
            due_s=call.at_s,
            sent_s=outcome.sent_s,
            num_prompt=call.prompt.num_tokens,
            num_output=call.num_output,
            arrivals_s=times_s[:1] + times_s[1:][-1:],
            num_received=len(times_s),
        )
        seen.end = (
            "refused" if outcome.was_refused else "finished" if outcome.has_ended else "unfinished"
        )
        self._seen.append(seen)
        self.phases.note(outcome)
        if times_s:  # else its prompt was not computed, or not all of it
            self.num_prompt_tokens += seen.num_prompt
            self.num_cached_tokens += outcome.num_cached_tokens
        self.num_output_tokens += seen.num_received
        self._uncounted.append((call.at_s, times_s))
        self._num_uncounted += len(times_s)
        if self._num_uncounted > _MOST_TOKENS:
            self._count()
        return seen

    def score(self, target: float) -> Score:
        """Return the score, as of a live run; percentiles of ITL are within half a percent."""
        self._count()
        in_time = self._num_in_time / (self.num_output_tokens or 1)
        return score(self._seen, self.promise, target, TokenFigures(self._itl_ms(), in_time))

    def _count(self) -> None:
        """Count the tokens that came in time, and the gaps, of calls that were noted lately."""
        lengths = np.array([len(times_s) for _, times_s in self._uncounted], np.int64)
        ends = lengths.cumsum()
        times_s = np.fromiter(chain.from_iterable(t for _, t in self._uncounted), np.float64)
        at_s = np.repeat([at_s for at_s, _ in self._uncounted], lengths)
        number = np.arange(len(times_s)) - np.repeat(ends - lengths, lengths)  # within its call
        due = (times_s - at_s - self.promise.ttft_s) / self.promise.tpot_s
        self._num_in_time += int(np.count_nonzero(np.round(due, 6) <= number))
        gaps_s = np.diff(times_s)[number[1:] > 0]  # not from one call to the next
        self._gaps += np.bincount(_bins(gaps_s), minlength=_NUM_BINS)
        self._uncounted, self._num_uncounted = [], 0

    def _itl_ms(self) -> Percentiles:
        ends = self._gaps.cumsum()
        if not ends[-1]:
            return Percentiles(0, None, None, None)
        at = np.searchsorted(ends, np.array([0.5, 0.9, 0.99]) * ends[-1])
        p50, p90, p99 = (1e3 * _LEAST_S * _STEP ** (at + 0.5)).tolist()
        return Percentiles(int(ends[-1]), p50, p90, p99)


def _bins(gaps_s: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return each gap's bin; those outside go to the first or the last."""
    exact = np.log(np.maximum(gaps_s, _LEAST_S) / _LEAST_S) / np.log(_STEP)
    bins: npt.NDArray[np.int64] = np.minimum(exact.astype(np.int64), _NUM_BINS - 1)
    return bins
