"""Where the time of a run went: the phases of requests on their nodes, and steps by kind.

Live nodes and simulated ones note the same moments (`lifecycle.Lifecycle`), so these figures tell
in which part a prediction is off.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pdserve.commands.simulation.outcome import Outcome
from pdserve.commands.simulation.step_times import REGIONS
from pdserve.commands.simulation.total import Total
from pdserve.measured.calibration import Region


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Means in milliseconds; None: there was none."""

    queue: float | None  # accepted by a node -> first scheduled
    prefill: float | None  # first scheduled -> token 1
    handoff: float | None  # token 1 -> first step on the decode node, if that is another one
    decode: float | None  # token 1, or that step -> last token
    steps: dict[Region, float | None]
    num_steps: dict[Region, int]

    @classmethod
    def between(cls, several: Sequence[Parts]) -> Parts:
        """Return the means of several runs with the same requests."""
        return cls(
            queue=_mean(parts.queue for parts in several),
            prefill=_mean(parts.prefill for parts in several),
            handoff=_mean(parts.handoff for parts in several),
            decode=_mean(parts.decode for parts in several),
            steps={r: _mean(parts.steps[r] for parts in several) for r in REGIONS},
            num_steps={
                r: round(statistics.fmean(parts.num_steps[r] for parts in several)) for r in REGIONS
            },
        )


def _mean(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return statistics.fmean(known) if known else None


class PhaseTotals:
    """Adds up the phases of calls, as their nodes noted them."""

    def __init__(self) -> None:
        self._queue, self._prefill, self._handoff, self._decode = (Total() for _ in range(4))

    def note(self, outcome: Outcome) -> None:
        """Note a call that has ended; others are left out."""
        if outcome.at_prefill is None or outcome.at_decode is None:
            return
        at_prefill, at_decode = outcome.at_prefill.phase_times(), outcome.at_decode.phase_times()
        self._queue.add(at_prefill.queue_s)
        self._prefill.add(at_prefill.prefill_s)
        if outcome.at_decode.prefill_end_s is not None:
            self._handoff.add(at_decode.handoff_s)
        if outcome.call.num_output > 1:
            self._decode.add(at_decode.decode_s)

    def parts(self, nodes: Iterable[Mapping[Region, Total]]) -> Parts:
        """Return the means; `nodes` have the steps of each."""
        steps = {region: Total() for region in REGIONS}
        for node in nodes:
            for region, total in node.items():
                steps[region].add(total.seconds, total.count)
        return Parts(
            queue=self._queue.mean_ms,
            prefill=self._prefill.mean_ms,
            handoff=self._handoff.mean_ms,
            decode=self._decode.mean_ms,
            steps={region: total.mean_ms for region, total in steps.items()},
            num_steps={region: total.count for region, total in steps.items()},
        )
