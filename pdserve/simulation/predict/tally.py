"""Running figures of a simulation, turned into the score of `pdserve bench compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from pdserve.bench.load.outcome import Outcome as Seen
from pdserve.bench.load.outcome import Percentiles, Promise
from pdserve.bench.load.slo_score import Score, score
from pdserve.simulation.outcome import Outcome

_LEAST_S, _STEP, _NUM_BINS = 1e-6, 1.005, 4200  # gaps from 1 us to 1,000 s, each within 0.5 %


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
        self._most_late = most_late
        self._is_hopeless = is_hopeless
        self._late: Counter[str] = Counter()
        self._seen: list[Seen] = []
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
            sent_s=call.at_s,
            num_prompt=len(call.token_ids),
            num_output=call.num_output,
            arrivals_s=times_s[:1] + times_s[1:][-1:],
            num_received=len(times_s),
        )
        seen.end = (
            "refused" if outcome.was_refused else "finished" if outcome.has_ended else "unfinished"
        )
        self._seen.append(seen)
        self.num_prompt_tokens += seen.num_prompt
        self.num_cached_tokens += outcome.num_cached_tokens
        self.num_output_tokens += seen.num_received
        due = (np.array(times_s) - call.at_s - self.promise.ttft_s) / self.promise.tpot_s
        self._num_in_time += int(np.count_nonzero(np.round(due, 6) <= np.arange(len(due))))
        if len(times_s) > 1:
            self._gaps += np.bincount(_bins(np.diff(times_s)), minlength=_NUM_BINS)
        return seen

    def score(self, target: float) -> Score:
        """Return the score, as of a live run; percentiles of ITL are within half a percent."""
        scored = score(self._seen, self.promise, target)
        in_time = self._num_in_time / (self.num_output_tokens or 1)
        return msgspec.structs.replace(scored, itl_ms=self._itl_ms(), tokens_in_time=in_time)

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
