"""Interference: the ITL of running streams with and without prompts that arrive meanwhile.

A few streams decode steadily. Then they do so again while long prompts arrive at fixed times. The
p99 of the gaps of the same streams is compared between the two runs, so neither the batch size nor
the handoff to a decode node is mistaken for interference.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.commands.bench.load.outcome import Outcome, Percentiles
from pdserve.commands.bench.load.scenarios import Scenario
from pdserve.commands.bench.load.workload import TimedRequest, draw_prompt

STREAMS = 4
STREAM_TOKENS = 1500  # long enough for all prompts to arrive meanwhile
PROMPTS = 3
FIRST_S = 0.5
EVERY_S = 1.5

_STREAM = "stream"


class Interference(msgspec.Struct, frozen=True):
    """ITL of the steady streams in both runs."""

    streams: int
    quiet_itl_ms: Percentiles
    disturbed_itl_ms: Percentiles
    p99_ratio: float | None  # disturbed / quiet; None: a run has no p99
    prompts_sent: int
    prompts_finished: int
    streams_finished: int  # of both runs, out of twice `streams`

    @property
    def is_whole(self) -> bool:
        """Whether all requests were served; otherwise the streams had less competition."""
        all_prompts = self.prompts_finished == self.prompts_sent
        return all_prompts and self.streams_finished == 2 * self.streams


def steady_requests(scenario: Scenario, seed: int, *, disturbed: bool) -> list[TimedRequest]:
    """Return the streams and, if `disturbed`, the prompts of `scenario.disturbed_by`.

    Streams have prompts of the scenario's first kind, disturbed ones of other contents, and
    `STREAM_TOKENS` tokens, or fewer where the longest request of the scenario has fewer.
    """
    steady = scenario.kinds[0]
    num_output = min(STREAM_TOKENS, scenario.most_tokens - steady.prompt.most)
    requests = [
        TimedRequest(0.0, _STREAM, draw_prompt(steady, [seed, i], int(disturbed)), num_output)
        for i in range(STREAMS)
    ]
    if disturbed:
        (kind,) = (kind for kind in scenario.kinds if kind.name == scenario.disturbed_by)
        requests += [
            TimedRequest(
                FIRST_S + i * EVERY_S,
                kind.name,
                draw_prompt(kind, [seed, STREAMS + i]),
                kind.output.most,
            )
            for i in range(PROMPTS)
        ]
    return requests


def compare_itl(quiet: Sequence[Outcome], disturbed: Sequence[Outcome]) -> Interference:
    """Compare the streams of both runs."""
    before, after = (Percentiles.of(_stream_gaps(run)) for run in (quiet, disturbed))
    prompts = [outcome for outcome in disturbed if outcome.kind != _STREAM]
    streams = [o for run in (quiet, disturbed) for o in run if o.kind == _STREAM]
    return Interference(
        streams=len(quiet),
        quiet_itl_ms=before,
        disturbed_itl_ms=after,
        p99_ratio=after.p99 / before.p99 if before.p99 and after.p99 is not None else None,
        prompts_sent=len(prompts),
        prompts_finished=sum(outcome.end == "finished" for outcome in prompts),
        streams_finished=sum(outcome.end == "finished" for outcome in streams),
    )


def _stream_gaps(run: Sequence[Outcome]) -> list[float]:
    return [gap for outcome in run if outcome.kind == _STREAM for gap in outcome.gaps_s]
