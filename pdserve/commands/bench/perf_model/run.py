"""`pdserve bench perf-model`: profiles a model, and checks predictions for unseen steps."""

from __future__ import annotations

import time

from rich.table import Table

from pdserve.commands.bench.output import print_json, print_tables
from pdserve.commands.bench.perf_model.config import PerfModelConfig
from pdserve.commands.bench.perf_model.measurement import (
    HeldOut,
    PerfModelReport,
    measure_held_out,
    phase_errors,
)
from pdserve.measured.perf_model import PerfModel
from pdserve.node.profiling.costs import measured_profile, step_limits
from pdserve.node.profiling.timer import StepTimer
from pdserve.node.start.model import load_runner, plan_model, use_cores
from pdserve.settings.config import NodeConfig
from pdserve.shared.process.exit_codes import OK


def run(config: PerfModelConfig, setup: dict[str, object]) -> int:
    """Measure and print; the exit code.

    Raises:
        PdserveError: the model cannot be used.
    """
    report = _measure(config)
    if config.json:
        print_json(report, setup)
    else:
        print_tables([_table(report), _worst_table(report)])
    return OK


def _measure(config: PerfModelConfig) -> PerfModelReport:
    node = NodeConfig(checkpoint=config.checkpoint, engine=config.engine)
    use_cores(node.engine)
    model = plan_model(node)
    runner = load_runner(model, None, lambda _: None)
    limits = step_limits(node.engine, model)
    started_s = time.perf_counter()
    profile = measured_profile(limits, runner, config.profile_s)
    profile_s, costs = time.perf_counter() - started_s, profile.costs
    profiled, corrected = PerfModel(costs), PerfModel(costs)
    measured = measure_held_out(
        HeldOut(limits.token_budget, limits.max_batch_size, limits.longest, limits.allow),
        StepTimer(runner, limits.block_size, limits.vocab_size).seconds,
        corrected,
        config.steps,
        config.repeats,
        config.seed,
    )
    return PerfModelReport(
        profile_s=profile_s,
        profile_error=profile.error,
        saturating_tokens=profiled.saturating_tokens(limits.token_budget),
        costs=costs,
        phases=phase_errors(measured, profiled, corrected),
    )


def _table(report: PerfModelReport) -> Table:
    table = Table(
        title=f"profiled in {report.profile_s:.1f} s to {100 * report.profile_error:.1f} %; "
        "error of predictions for other steps (%)"
    )
    for column in ("phase", "steps", "MAPE", "p90", "bias", "corrected", "p90", "first time (ms)"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for row in report.phases:
        errors = (row.mape, row.p90, row.bias, row.corrected_mape, row.corrected_p90)
        table.add_row(
            row.phase,
            str(row.steps),
            *(f"{100 * error:.1f}" for error in errors),
            f"+{row.first_time_ms:.2f}",
        )
    return table


def _worst_table(report: PerfModelReport) -> Table:
    table = Table(title="the worst of them (before correction)")
    columns = ("phase", "tokens", "sampled", "prefill pairs", "context", "real ms", "predicted ms")
    for column in columns:
        table.add_column(column, justify="left" if column == "phase" else "right")
    for row in report.phases:
        for worst in row.worst:
            table.add_row(
                row.phase,
                str(worst.tokens),
                str(worst.sampled),
                str(worst.prefill_pairs),
                str(worst.decode_context),
                f"{worst.real_ms:.2f}",
                f"{worst.predicted_ms:.2f}",
            )
    return table
