"""The answer of `pdserve plan` for people."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from pdserve.commands.simulation.plan.report import PlanReport
from pdserve.commands.simulation.plan.search import Tried


def tables(report: PlanReport) -> Iterator[RenderableType]:
    """The choice, what it was chosen from, how firm it is, and what to run."""
    promise = report.promise
    yield (
        f"{report.load}\n{report.rate:.3g} requests/s; promised: TTFT {promise.ttft_s * 1e3:.0f} "
        f"ms, TPOT {promise.tpot_s * 1e3:.1f} ms, to {report.target:.0%} of each kind"
    )
    yield "\n".join(_knee(report))
    yield _deployments(report)
    if report.unknown:
        yield "\n".join(f"not predicted: {what}: {why}" for what, why in report.unknown.items())
    if report.chosen is None:
        yield "None of these serves the load: allow more nodes (--max-nodes) or promise less."
    else:
        yield "\n".join(_choice(report, report.chosen.tried))
        yield _changes(report)
        yield "\n".join([*report.command, "Helm values: " + json.dumps(report.helm)])
        yield f"MODEL: what was calibrated is {report.card.model}"
    yield f"{report.card.text}\ntook {report.seconds:.0f} s"


def _knee(report: PlanReport) -> Iterator[str]:
    knee = report.knee
    yield (
        f"one node: prefills {knee.prefill_per_s:.3g} of these requests/s "
        f"({knee.mean_prompt:.0f} tokens, {knee.mean_shared:.0f} of them as in an earlier one), or "
        f"decodes {knee.decode_per_s:.3g}/s "
        f"({knee.mean_output:.0f} tokens) in batches of {knee.batch}, the most within the TPOT"
    )
    yield (
        f"its KV: {knee.kv_tokens} tokens of {knee.kv_token_bytes} bytes, so {knee.kv_concurrency} "
        f"such requests, or {knee.kv_concurrency_longest} of the longest; weights "
        f"{knee.weight_bytes / 1e9:.3g} GB"
    )
    yield f"format of KV: {knee.kv_format}"


def _deployments(report: PlanReport) -> Table:
    table = Table(title="deployments tried at this rate; * is cheapest at its TPOT")
    table.add_column("deployment")
    for column in (
        "price/h", "in time", "goodput/s", "TTFT p99 ms", "TPOT p50 ms", "idle",
        "per M uncached", "per M cached", "per M output",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    goodputs = {best.tried.deployment: best.goodput for best in report.cheapest}
    for one in report.tried:
        is_in_front = any(one is other for other in report.front)
        goodput = goodputs.get(one.deployment)
        table.add_row(
            one.deployment.text + (" *" if is_in_front else ""),
            f"{one.cost.per_hour:.4g}",
            f"{one.attainment:.0%}",
            "" if goodput is None else goodput.text,
            _number(one.result.score.ttft_ms.p99, 0),
            f"{one.tpot_ms:.1f}",
            f"{one.cost.idle_share:.0%}",
            _number(one.cost.per_million_uncached, 3),
            _number(one.cost.per_million_cached, 3),
            _number(one.cost.per_million_output, 3),
        )
    return table


def _choice(report: PlanReport, chosen: Tried) -> Iterator[str]:
    result = chosen.result
    yield f"choice: {chosen.deployment.text}, {chosen.cost.per_hour:.4g} an hour: {report.why}"
    rate = result.score.sent / result.seconds
    yield (
        f"Little's law: arriving requests found {result.in_flight:.1f} in flight; rate x latency "
        f"= {rate:.3g} x {result.mean_e2e_s:.3g} s = {rate * result.mean_e2e_s:.1f}"
    )


def _changes(report: PlanReport) -> Table:
    table = Table(title="if it turned out different: is the choice still in time, what would do")
    for column in ("what", "in time", "cheapest of this mode"):
        table.add_column(column)
    for change in report.changes:
        if change.attainment is None:
            table.add_row(change.what, "unknown", change.unknown)
            continue
        best = "none so large" if change.deployment is None else change.deployment.text
        table.add_row(change.what, f"{change.attainment:.0%}", best)
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
