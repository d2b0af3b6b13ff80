"""How many requests like the last ones the nodes could serve: in two pools, or each by itself.

What adaptive mode does with one request is felt by those that come later: a stream on an idle
prefill node slows the prompts to come, and one on a decode node leaves less room for chunks. No
prediction about a single request shows this. So it is also asked which of the two ways would serve
more such requests a second, if all went that way; where one serves clearly more, all go that way.

Neither way depends on the present load, so nothing swings to and fro. Means over the last few
hundred requests stand for all. A way serves so many requests that

    apart     nine of ten wait for no longer than is promised: prompts on prefill nodes, which
              share one queue, and streams for a place on decode nodes, where steps are in time
    together  the same of one node, where a stream has a step with a chunk of a prompt whenever the
              node has a prompt. Chunks are as large as TPOT allows (Sarathi-Serve), so a prompt
              takes longer there, and waits for longer

The wait of an M/G/1 queue is taken as exponential (heavy traffic: Kingman, 1962).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, sqrt
from typing import Final, Literal, TypeAlias

import numpy as np

from coordinator.routing.fleet import Fleet
from coordinator.routing.loads.means import RequestMeans
from coordinator.routing.loads.slots import Floats, Ints
from pdserve.rules.batch import aimed_s

Way: TypeAlias = Literal["apart", "together"]

FEWEST: Final = 8  # requests, before which their means say little
EVERY: Final = 32  # requests, after which it is looked at again, at the latest
SAMPLE: Final = 4  # nodes of a pool that stand for all: each has measured its own steps
CLEARLY: Final = 1.1  # times as many requests: what this model is surely right about
LEAST_CHUNK: Final = 16  # tokens; with room for fewer, prompts are taken to wait for streams
_HALVINGS: Final = 10  # of an interval of rates
_ROUNDS: Final = 4  # until the pace of a batch and its size agree
# Batches that stand for all, in standard deviations, and how often there are such.
_DEVIATIONS: Final = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
_WEIGHTS: Final = np.array([0.054, 0.244, 0.404, 0.244, 0.054])


class NodeCosts:
    """What one node does with requests of these means; arrays are by streams in its batch."""

    def __init__(self, fleet: Fleet, slot: int, means: RequestMeans) -> None:
        tables, row = fleet.tables, int(fleet.row[slot])
        budget = int(tables.token_budget[row])
        seconds: Floats = tables.seconds[row]
        num_kv = float(fleet.kv_tokens[slot]) / (means.context + means.output / 2)
        most = max(1, min(int(tables.max_batch[row]), int(num_kv)))
        prefill_ratio, limit_s = float(fleet.prefill_ratio[slot]), aimed_s(means.tpot_s)
        rows = np.arange(most + 1)
        beside_s = (tables.sampled_s[row] + tables.context_s[row] * means.context) * rows
        decode_s: Floats = np.maximum.accumulate(seconds[rows] + beside_s)
        decode_s *= fleet.decode_ratio[slot]
        fits = max(1, int(np.searchsorted(decode_s, limit_s, "right")) - 1)
        rows, beside_s = rows[: fits + 1], beside_s[: fits + 1]
        self._means = means
        self._decode_s = decode_s[: fits + 1]
        self.places = fits
        self.most_per_s = fits / (means.output * float(decode_s[fits]))  # streams, and no prompts

        # Of a prompt: its share of full steps; and alone, in chunks of the budget.
        keys = means.prompt - means.uncached / 2  # that one of its tokens looks at, on average
        keys_s = float(tables.pair_s[row]) * keys
        full, rest = divmod(ceil(means.uncached), budget)
        full_s = float(seconds[budget])
        self.prompt_s = means.uncached * (full_s / budget + keys_s) * prefill_ratio
        alone_s = full * full_s + float(seconds[rest]) + means.uncached * keys_s
        self.alone_s = alone_s * prefill_ratio

        # Beside streams, in chunks that leave them what was promised, if any do.
        rising: Floats = tables.rising[row, : int(tables.num_tabulated[row]) + 1]
        room: Ints = np.searchsorted(rising, limit_s / prefill_ratio - beside_s, "right")
        chunk = np.clip(room - 1 - rows, 0, np.maximum(budget - rows, 0))
        chunk[chunk < LEAST_CHUNK] = 0
        step_s = (seconds[rows + chunk] + beside_s + keys_s * chunk) * prefill_ratio
        self._mixed_s: Floats = np.where(chunk, np.maximum(step_s, self._decode_s), self._decode_s)
        self._prompts_per_s: Floats = np.full(fits + 1, 1 / self.alone_s)
        self._prompts_per_s[1:] = chunk[1:] / (step_s[1:] * means.uncached)
        # How long a prompt takes; where there is no room, some of the streams must end first.
        last = int(np.flatnonzero(self._prompts_per_s)[-1])
        ends_s = means.output * self._decode_s / np.maximum(rows, 1)
        self._prompt_s = 1 / self._prompts_per_s[np.minimum(rows, last)]
        self._prompt_s += np.maximum(rows - last, 0) * ends_s

    def serves(self, per_s: float) -> bool:
        """Return whether the node could serve so many requests a second, in time.

        Batches are now larger and now smaller than their mean, as by chance. So it computes prompts
        now faster and now slower, or not at all.
        """
        means, most = self._means, len(self._decode_s) - 1
        pace_s, prompts_per_s = float(self._decode_s[1]), 1 / self.alone_s
        for _ in range(_ROUNDS):
            batch = per_s * means.output * pace_s
            if batch > most:
                return False
            batches = np.rint(batch + sqrt(batch) * _DEVIATIONS).astype(np.int64)
            batches = np.clip(batches, 0, most)
            prompts_per_s = float(_WEIGHTS @ self._prompts_per_s[batches])
            if per_s >= prompts_per_s:
                return False
            of_streams = np.maximum(batches, 1)
            busy = per_s / prompts_per_s  # share of the time
            steps_per_s = busy / self._mixed_s[of_streams] + (1 - busy) / self._decode_s[of_streams]
            pace_s = float(_WEIGHTS @ (1 / steps_per_s))
        prompt_s = float(_WEIGHTS @ self._prompt_s[batches])
        return pace_s <= means.tpot_s and not means.is_late(per_s, prompt_s, prompt_s, 1)


class Ways:
    """Which of the two ways all requests go now."""

    def __init__(self, fleet: Fleet, means: RequestMeans) -> None:
        self._fleet = fleet
        self._means = means
        self._now: Way | None = None
        self._seen: Way | None = None  # at the last look
        self._looks_at = FEWEST

    def better(self, prefills: Ints, decodes: Ints, any_nodes: Ints) -> Way | None:
        """Return the way to go; None: neither has ever been clearly better.

        It is kept until the other is clearly better, twice in a row: a few long prompts among the
        last requests may be chance.

        Args:
            prefills, decodes: the slots of the two pools, apart; both have nodes.
            any_nodes: those that would have both prompts and streams.
        """
        if (num_ended := self._means.num_ended) >= self._looks_at:
            self._looks_at = num_ended + min(num_ended, EVERY)
            self._means.update()
            seen = clearly_better(self._fleet, prefills, decodes, any_nodes, self._means)
            if seen is not None and (self._now is None or seen == self._seen):
                self._now = seen
            self._seen = seen
        return self._now


def clearly_better(
    fleet: Fleet, prefills: Ints, decodes: Ints, any_nodes: Ints, means: RequestMeans
) -> Way | None:
    """Return the way in which clearly more such requests could be served; None: neither."""
    if not (means.uncached and fleet.is_profiled[any_nodes].all()):
        return None
    apart = min(_prompts_per_s(fleet, prefills, means), _streams_per_s(fleet, decodes, means))
    together = sum(
        n * _most(costs.most_per_s, costs.serves) for costs, n in _sample(fleet, any_nodes, means)
    )
    if apart > CLEARLY * together:
        return "apart"
    return "together" if together > CLEARLY * apart else None


def _prompts_per_s(fleet: Fleet, slots: Ints, means: RequestMeans) -> float:
    """Return how many prompts a second these nodes would compute in time, as one queue's servers.

    They are taken for as many nodes of their mean speed.
    """
    sample, number = list(_sample(fleet, slots, means)), len(slots)
    prompt_s = number / sum(n / costs.prompt_s for costs, n in sample)
    alone_s = number / sum(n / costs.alone_s for costs, n in sample)
    return _most(
        number / prompt_s, lambda per_s: not means.is_late(per_s, prompt_s, alone_s, number)
    )


def _streams_per_s(fleet: Fleet, slots: Ints, means: RequestMeans) -> float:
    """Return how many streams a second find a place on these nodes in time."""
    sample = list(_sample(fleet, slots, means))
    places = sum(n * costs.places for costs, n in sample)
    most = sum(n * costs.most_per_s for costs, n in sample)
    pace_s = places / (most * means.output)
    return _most(most, lambda per_s: not means.waits(per_s, most, places, pace_s))


def _sample(fleet: Fleet, slots: Ints, means: RequestMeans) -> Iterator[tuple[NodeCosts, float]]:
    """Yield the costs of some nodes, and for how many each stands; those of one kind once."""
    some = slots[:: ceil(len(slots) / SAMPLE)]
    _, firsts, numbers = np.unique(fleet.row[some], return_index=True, return_counts=True)
    for first, number in zip(firsts.tolist(), numbers.tolist(), strict=True):
        yield NodeCosts(fleet, int(some[first]), means), number * len(slots) / len(some)


def _most(upper: float, holds: Callable[[float], bool]) -> float:
    """Return the highest value up to `upper` for which something holds that ends to hold."""
    lower = 0.0
    for _ in range(_HALVINGS):
        middle = (lower + upper) / 2
        if holds(middle):
            lower = middle
        else:
            upper = middle
    return lower
