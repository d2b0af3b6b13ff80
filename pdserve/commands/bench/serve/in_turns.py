"""Backends one after the other on the same cores: each is started, measured and ended.

In each round another one is first, so ratios compare neighbouring rounds here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from pdserve.commands.bench.load.client_run import Run
from pdserve.commands.bench.serve.backend import Backend
from pdserve.commands.bench.serve.backend_process import Started
from pdserve.commands.bench.serve.config import Load, ServePlan
from pdserve.commands.bench.serve.report import ServeReport, serve_ratio, serve_row
from pdserve.commands.bench.serve.rounds import open_targets, run_round, turns

Start = Callable[[Backend], AbstractAsyncContextManager[Started]]


async def serve_in_turns(
    backends: Sequence[Backend],
    plan: ServePlan,
    start: Start,
    report: ServeReport,
    tell: Callable[[str], None] = lambda text: None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Run every load on every backend; `report` has all that is done, whenever it ends.

    Raises:
        PdserveError: a backend cannot be started or used.
    """
    names = [backend.name for backend in backends]
    done = {load: {name: list[Run]() for name in names} for load in plan.loads}
    models: dict[str, str] = {}
    for number in range(plan.rounds):
        for index in turns(len(backends), number):
            one = backends[index]
            tell(f"round {number + 1} of {plan.rounds}: {one.name} starts")
            chosen = [one.model] if one.model else []
            async with (
                start(one) as started,
                open_targets([started.url], chosen, plan, headers) as (target,),
            ):
                models[one.name] = target.model
                for load in plan.loads:
                    tell(f"{load}, round {number + 1} of {plan.rounds}: {one.name}")
                    done[load][one.name].append(await run_round(target, load, plan, number))
                    _report(report, done, models)


def _report(
    report: ServeReport, done: Mapping[Load, Mapping[str, list[Run]]], models: Mapping[str, str]
) -> None:
    """Write anew what `report` says, from all rounds until now."""
    report.rows.clear()
    report.ratios.clear()
    for load, runs in done.items():
        rows = {name: some for name, some in runs.items() if some}
        report.rows.extend(serve_row(name, models[name], load, some) for name, some in rows.items())
        first = next(iter(runs.values()))
        for name, some in [*rows.items()][1:]:
            if both := min(len(first), len(some)):
                report.ratios.append(serve_ratio(name, load, first[:both], some[:both]))
