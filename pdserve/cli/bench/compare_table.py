"""Prints the report of `pdserve bench compare` as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table

from pdserve.bench.compare.report import (
    KEPT_UP_MS,
    CompareReport,
    ModeReport,
    RateRow,
    ScenarioReport,
)
from pdserve.bench.slo_score import Percentiles

BUSY = 0.5  # load average above which the report warns
_PERCENTILES = "p50/p90/p99"


def tables(report: CompareReport) -> Iterator[RenderableType]:
    """For each scenario its results and the measurements behind them; then the remarks."""
    for scenario in report.scenarios:
        modes = [mode for mode in report.modes if mode.scenario == scenario.name]
        yield rate_table(scenario, modes)
        yield mode_table(scenario, modes)
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
    for column in ("in time", "95 %", "kind", "TTFT ok", "TPOT ok", "sent", "refused", "other"):
        table.add_column(column, justify="right")
    for column in ("TTFT ms", "TPOT ms", "ITL ms"):
        table.add_column(f"{column} {_PERCENTILES}", justify="right")
    for column in ("ITL p99 / idle", "client late p99"):
        table.add_column(column, justify="right")
    lines = sorted(((row.rate, mode.mode, row) for mode in modes for row in mode.rows), key=_order)
    for number, (rate, name, row) in enumerate(lines):
        table.add_row(
            f"{rate:.3g}",
            name,
            *_rate_cells(row),
            end_section=number + 1 < len(lines) and lines[number + 1][0] != rate,
        )
    return table


def mode_table(scenario: ScenarioReport, modes: Sequence[ModeReport]) -> Table:
    """One row per mode: its goodput, and its ITL when idle and when disturbed by long prompts."""
    best = max((mode.goodput for mode in modes), default=0.0)
    table = Table(title=f"{scenario.name}: goodput ({scenario.target:.0%} in time)")
    table.add_column("mode")
    for column in (
        "goodput",
        "5-95 %",
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
        low, high = mode.goodput_interval
        table.add_row(
            mode.mode,
            mode.goodput_text,
            f"{low:.3g}-{high:.3g}",
            f"{mode.goodput / best:.0%}" if best else "-",
            "-" if mode.tuning is None else mode.tuning.text,
            _three(mode.unloaded.itl_ms, 1),
            "-" if disturbed is None else _number(disturbed.quiet_itl_ms.p99, 1),
            "-" if disturbed is None else _number(disturbed.disturbed_itl_ms.p99, 1),
            "-" if disturbed is None else _number(disturbed.p99_ratio, 2),
        )
    return table


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


def remarks(report: CompareReport) -> list[str]:
    """Explanations and warnings."""
    said = [
        "TTFT counts from when a request was due. Refused, failed and unfinished requests are "
        "sent ones that were not in time. Of several kinds of requests, the one of which the "
        "fewest were in time counts (column kind). The client and the coordinators have no cores "
        "of their own: what they use, the nodes do not get, in every mode."
    ]
    load = report.setup.get("load_average")
    if isinstance(load, float) and load > BUSY:
        said.append(f"Other work ran on this machine: its load was {load:.1f} when this began.")
    late = sum(not row.client_kept_up for mode in report.modes for row in mode.rows)
    if late:
        said.append(f"In {late} rows marked ! the client was late by over {KEPT_UP_MS:g} ms (p99).")
    for mode in report.modes:
        disturbed = mode.interference
        if disturbed is not None and not disturbed.is_whole:
            said.append(
                f"{mode.scenario}: {mode.mode} served {disturbed.prompts_finished} of "
                f"{disturbed.prompts_sent} prompts that were to disturb its streams, and "
                f"{disturbed.streams_finished} of {2 * disturbed.streams} streams: the ratio of "
                "its ITLs may look too good."
            )
    for scenario in report.scenarios:
        said.append(f"{scenario.name}: {scenario.stopped}; took {scenario.seconds:.0f} s.")
        if scenario.num_cut:
            said.append(f"{scenario.name}: {scenario.num_cut} requests were cut to fit the model.")
    said += [f"{who} is missing: {why}" for who, why in report.failures.items()]
    return said


def _rate_cells(row: RateRow) -> list[str]:
    score = row.score
    return [
        f"{score.attainment:.0%}",
        f"{score.attainment_low:.0%}-{score.attainment_high:.0%}",
        score.worst_kind,
        f"{score.ttft_attainment:.0%}",
        f"{score.tpot_attainment:.0%}",
        str(score.sent),
        str(score.refused),
        str(score.failed + score.unfinished),
        _three(score.ttft_ms, 0),
        _three(score.tpot_ms, 1),
        _three(score.itl_ms, 1),
        _number(row.itl_p99_vs_unloaded, 2),
        _number(score.late_ms.p99, 1) + ("" if row.client_kept_up else " !"),
    ]


def _order(line: tuple[float, str, RateRow]) -> tuple[float, str]:
    return line[:2]


def _three(figures: Percentiles, digits: int) -> str:
    return "/".join(_number(p, digits) for p in (figures.p50, figures.p90, figures.p99))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
