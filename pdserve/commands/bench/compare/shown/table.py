"""The report of `pdserve bench compare` as tables, and what their reader must know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import RenderableType
from rich.table import Table

from pdserve.commands.bench.compare.report import (
    CompareReport,
    ModeReport,
    RateRow,
    ScenarioReport,
)
from pdserve.commands.bench.compare.shown.suspicions import suspicions
from pdserve.commands.bench.load.slo_score import Score

# Of what `share_cells` returns.
SHARES: Final = ("in time", "95 %", "kind", "TTFT ok", "TPOT ok", "sent", "refused")
_PERCENTILES = "p50/p90/p99"
BUSY = 0.5  # load average above which the report warns
_FEW = 100  # requests, below which a p99 is between the slowest two

_DEFINITIONS = (
    "TTFT counts from when a request was due. Refused, failed and unfinished requests are sent "
    "ones that were not in time. Of several kinds of requests, the one of which the fewest were "
    "in time counts (column kind). The client and the coordinators have no cores of their own: "
    "what they use, the nodes do not get, in every mode."
)


def tables(report: CompareReport) -> Iterator[RenderableType]:
    """For each scenario its results and the measurements behind them; then the remarks."""
    for scenario in report.scenarios:
        modes = [mode for mode in report.modes if mode.scenario == scenario.name]
        yield rate_table(scenario, modes)
        yield mode_table(scenario, modes)
        yield "\n".join(verdict_lines(scenario, modes))
        if any(len(row.score.kinds) > 1 for mode in modes for row in mode.rows):
            yield kind_table(scenario, modes)
        if any(mode.trials for mode in modes):
            yield tuning_table(modes)
    yield "\n".join(remarks(report))


def rate_table(scenario: ScenarioReport, modes: Sequence[ModeReport]) -> Table:
    """One row per rate and mode."""
    promise = scenario.promise
    table = Table(
        title=f"{scenario.name}: {scenario.shows}\n"
        f"prompts of {scenario.mean_prompt_tokens:.0f} tokens and answers of "
        f"{scenario.mean_output_tokens:.0f} on average; promised: TTFT {promise.ttft_s * 1e3:.0f} "
        f"ms, TPOT {promise.tpot_s * 1e3:.1f} ms ({scenario.promise_is})"
    )
    table.add_column("rate/s", justify="right")
    table.add_column("mode")
    for column in (*SHARES, "other"):
        table.add_column(column, justify="right")
    for column in ("TTFT ms", "TPOT ms", "ITL ms"):
        table.add_column(f"{column} {_PERCENTILES}", justify="right")
    for column in ("tokens in time", "at once", "ITL p99 / idle", "client late p99"):
        table.add_column(column, justify="right")
    for rate, rows in _by_rate(modes):
        for name, row in rows:
            table.add_row(f"{rate:.3g}", name, *_rate_cells(row))
        table.add_section()
    return table


def kind_table(scenario: ScenarioReport, modes: Sequence[ModeReport]) -> Table:
    """One row per rate, mode and kind of requests."""
    table = Table(title=f"{scenario.name}: each kind of requests")
    table.add_column("rate/s", justify="right")
    for column in ("mode", "kind"):
        table.add_column(column)
    for column in ("in time", "sent", f"TTFT ms {_PERCENTILES}", f"TPOT ms {_PERCENTILES}"):
        table.add_column(column, justify="right")
    for rate, rows in _by_rate(modes):
        for name, row in rows:
            for kind, scored in row.score.kinds.items():
                table.add_row(
                    f"{rate:.3g}",
                    name,
                    kind,
                    f"{scored.attainment:.0%}",
                    str(scored.sent),
                    scored.ttft_ms.text(0),
                    scored.tpot_ms.text(1),
                )
        table.add_section()
    return table


def mode_table(scenario: ScenarioReport, modes: Sequence[ModeReport]) -> Table:
    """One row per mode: its goodput, and its ITL when idle and when disturbed by long prompts."""
    # A ratio needs both goodputs, so there is none to a mode that kept up with every rate.
    known = all(mode.goodput_is != "above the rates" for mode in modes)
    best = max((mode.goodput for mode in modes), default=0.0) if known else 0.0
    table = Table(title=f"{scenario.name}: goodput ({scenario.target:.0%} in time)")
    table.add_column("mode")
    for column in (
        "goodput",
        "5-95 %",
        "per core",
        "of the best",
        "tuned",
        f"idle ITL ms {_PERCENTILES}",
        "quiet ITL p99",
        "disturbed ITL p99",
        "ratio",
    ):
        table.add_column(column, justify="right")
    for mode in modes:
        disturbed = mode.interference
        table.add_row(
            mode.mode,
            mode.goodput_text,
            mode.interval_text,
            f"{mode.goodput / scenario.cores:.3g}/s" if mode.goodput else "-",
            f"{mode.goodput / best:.0%}" if mode.goodput_is == "crossing" and best else "-",
            "-" if mode.tuning is None else mode.tuning.text,
            mode.unloaded.itl_ms.text(1),
            "-" if disturbed is None else _number(disturbed.quiet_itl_ms.p99, 1),
            "-" if disturbed is None else _number(disturbed.disturbed_itl_ms.p99, 1),
            "-" if disturbed is None else _number(disturbed.p99_ratio, 2),
        )
    return table


def verdict_lines(scenario: ScenarioReport, modes: Sequence[ModeReport]) -> Iterator[str]:
    """Yield what has been shown, how far it can be believed, and what the figures hide."""
    for verdict in scenario.verdicts:
        yield f"{scenario.name}: {verdict.text}."
    if scenario.noise is not None:
        yield f"{scenario.name}: {scenario.noise.text}"
    if scenario.length_factor < 1:
        yield (
            f"{scenario.name}: lengths are {scenario.length_factor:.3g} of the whole ones, to fit "
            "the model and the time."
        )
    late = [row.rate for mode in modes for row in mode.rows if not row.client_kept_up]
    if late:
        yield (
            f"{scenario.name}: from {min(late):.3g}/s on the load client itself was late: a "
            "goodput above that may be its limit, not a server's."
        )
    if scenario.answers.text:
        yield f"{scenario.name}: {scenario.answers.text}."
    for mode in modes:
        for text in suspicions(mode):
            yield f"{scenario.name}: {mode.mode} {text}."


def tuning_table(modes: Sequence[ModeReport]) -> Table:
    """One row per setting that was tried for the co-located mode."""
    trials = [trial for mode in modes for trial in mode.trials]
    table = Table(title=f"co-located, tuned at {trials[0].rate:.3g}/s")
    columns = (
        "nodes and local chunks",
        "in time",
        "would meet promises x",
        "TTFT p90 ms",
        "TPOT p90 ms",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for trial in trials:
        table.add_row(
            trial.tuning.text,
            f"{trial.score.attainment:.0%}",
            _number(trial.score.slo_scale, 2),
            _number(trial.score.ttft_ms.p90, 0),
            _number(trial.score.tpot_ms.p90, 1),
        )
    return table


def share_cells(score: Score) -> list[str]:
    """Return which shares of a run's requests kept the promise, and how many there were."""
    return [
        f"{score.attainment:.0%}",
        f"{score.attainment_low:.0%}-{score.attainment_high:.0%}",
        score.worst_kind,
        f"{score.ttft_attainment:.0%}",
        f"{score.tpot_attainment:.0%}",
        str(score.sent),
        str(score.refused),
    ]


def _rate_cells(row: RateRow) -> list[str]:
    score = row.score
    return [
        *share_cells(score),
        str(score.failed + score.unfinished),
        score.ttft_ms.text(0),
        score.tpot_ms.text(1),
        score.itl_ms.text(1),
        f"{score.tokens_in_time:.0%}",
        f"{score.tokens_at_once:.1f}",
        _number(row.itl_p99_vs_unloaded, 2),
        _number(score.late_ms.p99, 1) + ("" if row.client_kept_up else " !"),
    ]


def _by_rate(modes: Sequence[ModeReport]) -> list[tuple[float, list[tuple[str, RateRow]]]]:
    """Return the rates, ascending, each with the rows of all modes by name."""
    rates = sorted({row.rate for mode in modes for row in mode.rows})
    named = [(_name(mode, row), row) for mode in modes for row in mode.rows]
    named.sort(key=lambda line: (line[1].beside_itself, line[0]))
    return [(rate, [line for line in named if line[1].rate == rate]) for rate in rates]


def _name(mode: ModeReport, row: RateRow) -> str:
    """A mode beside itself is no further mode."""
    return f"{mode.mode}, once more (A/A)" if row.beside_itself else mode.mode


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


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
