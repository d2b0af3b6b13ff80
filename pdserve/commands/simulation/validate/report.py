"""The report of `pdserve bench prediction`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

import msgspec
from rich.table import Table

from pdserve.commands.simulation.predict.answer import said_errors
from pdserve.commands.simulation.predict.parts import Parts
from pdserve.commands.simulation.step_times import REGIONS
from pdserve.commands.simulation.validate.regret import Regret, said
from pdserve.commands.simulation.validate.row import Figures, Row
from pdserve.measured.calibration import HeldOutErrors

_KNEE = 0.97  # attainment, predicted or measured, from which on a rate is below the knee


class PredictionReport(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions beside measurements."""

    rows: list[Row]
    regrets: list[Regret]
    errors: HeldOutErrors
    outside: dict[str, tuple[int, int]]

    @property
    def remarks(self) -> list[str]:
        """The errors over all rows."""
        pairs = [
            (predicted, measured)
            for row in self.rows
            for predicted, measured, limit in zip(
                row.predicted, row.measured, row.limits, strict=True
            )
            if not limit
        ]
        below = [pair for pair in pairs if max(pair[0].attainment, pair[1].attainment) >= _KNEE]
        points = _points(pairs)
        chance = sum(b.attainment_low <= a.attainment <= b.attainment_high for a, b in pairs)
        goodputs = [row.goodput_error for row in self.rows if row.goodput_error is not None]
        return [
            f"step times held out: {said_errors(self.errors)}",
            _line("attainment, points", points, "{:.1f}"),
            _line("attainment below the knee", _points(below), "{:.1f}"),
            f"{chance} of {len(pairs)} attainments lie within the measured 95 % intervals",
            _line("goodput, where the crossing was measured", map(abs, goodputs), "{:.1%}"),
            self._said_tails(),
            _line("TTFT p99 below the knee", _off(below, lambda f: f.ttft_p99), "{:.1%}"),
            _line("TPOT p50 below the knee", _off(below, lambda f: f.tpot_p50), "{:.1%}"),
            *said(self.regrets),
            *self._said_limits(),
            self._said_machine(),
            *(
                f"OUTSIDE the calibration: {what} from {least} to {most}"
                for what, (least, most) in self.outside.items()
            ),
        ]

    def _said_tails(self) -> str:
        tails, expected = [], 0.0
        for row in self.rows:
            for runs, bounds, measured, limit in zip(
                row.predicted_kinds,
                row.predicted_ttft_p99,
                row.measured,
                row.limits,
                strict=True,
            ):
                if bounds is None or measured.ttft_p99 is None or limit:
                    continue
                least, most = bounds
                tails.append(least <= measured.ttft_p99 <= most)
                # One more run is as likely to be the least or the most one as any of these.
                expected += 1 - 2 / (len(runs) + 1)
        return (
            f"{sum(tails)} of {len(tails)} TTFT p99 lie within those of the simulated runs; were "
            f"the prediction perfect, {expected:.0f} would"
        )

    def _said_limits(self) -> list[str]:
        limits = [limit for row in self.rows for limit in row.limits]
        told = []
        for limit, what in (
            ("client's limit", "the load client is the limit, measured or predicted"),
            ("others' load", "processes of others had more than a tenth of the cores"),
            ("another pace", "the idle cluster's pace changed by more than a tenth"),
        ):
            if num_limited := limits.count(limit):
                told.append(
                    f"at {num_limited} of {len(limits)} rates {what}: they are left out of all "
                    "errors"
                )
        return told

    def _said_machine(self) -> str:
        paces = sorted(pace for row in self.rows for pace in row.pace if pace is not None)
        if not paces:
            return "the machine may have been faster or slower than when it was calibrated"
        return (
            f"steps of idle clusters took {statistics.median(paces):.2f} times as long as "
            f"calibrated in the median, {paces[0]:.2f} to {paces[-1]:.2f}: runs are predicted for "
            "what it was around each"
        )


def _points(pairs: Iterable[tuple[Figures, Figures]]) -> list[float]:
    return [100 * abs(predicted.attainment - measured.attainment) for predicted, measured in pairs]


def _off(
    pairs: Iterable[tuple[Figures, Figures]], figure: Callable[[Figures], float | None]
) -> list[float]:
    of_both = [(figure(predicted), figure(measured)) for predicted, measured in pairs]
    return [abs(ours / theirs - 1) for ours, theirs in of_both if ours is not None and theirs]


def _line(what: str, errors: Iterable[float], form: str) -> str:
    known = sorted(errors)
    if not known:
        return f"error of {what}: none was comparable"
    median, worst = form.format(statistics.median(known)), form.format(known[-1])
    return f"error of {what}: median {median}, worst {worst}, of {len(known)}"


def table(report: PredictionReport) -> Table:
    """For people: predicted / measured."""
    made = Table(title="predicted / measured")
    for column in ("load", "deployment", "rate", "in time (%)", "TTFT p50", "TTFT p99 (ms)",
                   "TPOT p50", "TPOT p99 (ms)", "goodput"):  # fmt: skip
        made.add_column(column, justify="left" if column in ("load", "deployment") else "right")
    for row in report.rows:
        for number, (rate, predicted, measured, limit) in enumerate(
            zip(row.rates, row.predicted, row.measured, row.limits, strict=True)
        ):
            goodput = "" if number else _goodput(row)
            mark = f" {limit}" if limit else ""
            made.add_row(
                row.case if not number else "",
                row.deployment if not number else "",
                f"{rate:.2f}",
                f"{100 * predicted.attainment:.0f} / {100 * measured.attainment:.0f} "
                f"({100 * measured.attainment_low:.0f}-{100 * measured.attainment_high:.0f}){mark}",
                _both(predicted.ttft_p50, measured.ttft_p50, ".0f"),
                _both(predicted.ttft_p99, measured.ttft_p99, ".0f"),
                _both(predicted.tpot_p50, measured.tpot_p50, ".1f"),
                _both(predicted.tpot_p99, measured.tpot_p99, ".1f"),
                goodput,
                end_section=number + 1 == len(row.rates),
            )
    return made


def parts_table(report: PredictionReport) -> Table:
    """Where the time went, to see what is off: means, predicted / measured.

    The last column is of steps of the idle cluster: by how much the machine itself, or the costs,
    differ from the calibration.
    """
    made = Table(title="where the time goes: means in ms, predicted / measured")
    for column in ("load", "deployment", "rate", "queue", "prefill", "handoff", "decode",
                   *(f"{region} step" for region in REGIONS), "pace"):  # fmt: skip
        made.add_column(column, justify="left" if column in ("load", "deployment") else "right")
    for row in report.rows:
        for number, (rate, predicted, measured, pace) in enumerate(
            zip(row.rates, row.predicted_parts, row.measured_parts, row.pace, strict=True)
        ):
            made.add_row(
                row.case if not number else "",
                row.deployment if not number else "",
                f"{rate:.2f}",
                *(
                    f"{_ms(ours)} / {_ms(theirs)}"
                    for ours, theirs in zip(_means(predicted), _means(measured), strict=True)
                ),
                "-" if pace is None else f"x {pace:.2f}",
                end_section=number + 1 == len(row.rates),
            )
    return made


def _both(predicted: float | None, measured: float | None, form: str) -> str:
    return " / ".join("-" if ms is None else format(ms, form) for ms in (predicted, measured))


def _means(parts: Parts) -> list[float | None]:
    phases = [parts.queue, parts.prefill, parts.handoff, parts.decode]
    return [*phases, *(parts.steps[region] for region in REGIONS)]


def _ms(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.2f}" if mean < 10 else f"{mean:.1f}"


def _goodput(row: Row) -> str:
    goodputs = row.paced_goodput, row.measured_goodput
    return " / ".join("?" if goodput is None else f"{goodput:.2f}" for goodput in goodputs)
