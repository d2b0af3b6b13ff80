"""What a reader of `pdserve bench compare` must know beside its tables."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.bench.compare.report import CompareReport, ModeReport, ScenarioReport

BUSY = 0.5  # load average above which the report warns
_FEW = 100  # requests, below which a p99 is between the slowest two

_DEFINITIONS = (
    "TTFT counts from when a request was due. Refused, failed and unfinished requests are sent "
    "ones that were not in time. Of several kinds of requests, the one of which the fewest were "
    "in time counts (column kind). The client and the coordinators have no cores of their own: "
    "what they use, the nodes do not get, in every mode."
)


def remarks(report: CompareReport) -> Iterator[str]:
    """Yield explanations and warnings."""
    yield _DEFINITIONS
    load = report.setup.get("load_average")
    if isinstance(load, float) and load > BUSY:
        yield f"Other work ran on this machine: its load was {load:.1f} when this began."
    yield from _doubts(report)
    for mode in report.modes:
        yield from _on_interference(mode)
    for scenario in report.scenarios:
        yield from _on_scenario(scenario)
    for who, why in report.failures.items():
        yield f"{who} is missing: {why}"


def _doubts(report: CompareReport) -> Iterator[str]:
    """Yield why percentiles or whole rows say less than they seem to."""
    rows = [row for mode in report.modes for row in mode.rows]
    late = sum(not row.client_kept_up for row in rows)
    if late:
        yield (
            f"In {late} rows marked ! the client itself was late (p99, in sending or receiving) by "
            "more than a tenth of the promised TTFT or 50 ms: their times are partly its own, so "
            "do not rely on them, nor on a goodput beside them."
        )
    if any(row.score.finished < row.score.sent for row in rows):
        yield (
            "Percentiles leave out what did not happen: TTFT of requests without a token, TPOT of "
            "requests that did not finish. They look better than they should where many of the "
            "sent ones were refused or did not end."
        )
    if any(row.score.sent < _FEW for row in rows):
        yield f"A p99 of fewer than {_FEW} requests lies between the slowest two of them."


def _on_interference(mode: ModeReport) -> Iterator[str]:
    disturbed = mode.interference
    if disturbed is not None and not disturbed.is_whole:
        yield (
            f"{mode.scenario}: {mode.mode} served {disturbed.prompts_finished} of "
            f"{disturbed.prompts_sent} prompts that were to disturb its streams, and "
            f"{disturbed.streams_finished} of {2 * disturbed.streams} streams: the ratio of its "
            "ITLs may look too good."
        )


def _on_scenario(scenario: ScenarioReport) -> Iterator[str]:
    yield f"{scenario.name}: {scenario.stopped}; took {scenario.seconds:.0f} s."
    if scenario.num_cut:
        yield f"{scenario.name}: {scenario.num_cut} requests were cut to fit the model."
