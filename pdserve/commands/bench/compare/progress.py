"""What a comparison is about to do, what it is at, and how much of its time is left at most."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from pdserve.commands.bench.compare.config import COLOCATED, CompareConfig, ComparePlan
from pdserve.shared.clock import Clock

_BUSY: Final = 0.3  # load average per core, from which on figures are of something else, too


def announcement(
    config: CompareConfig, plan: ComparePlan, folder: Path, load_average: object
) -> Iterator[str]:
    """Yield lines: what is compared, at which rates, for how long at most, and what becomes of it.

    `load_average` is what the conditions of the measurement say of it.

    Raises:
        ConfigError: as CompareConfig.backends.
    """
    yield f"to compare: {', '.join(plan.modes)}"
    requests = f"those of {config.trace}" if config.trace else ", ".join(config.scenarios)
    yield f"requests:   {requests}"
    yield f"model:      {config.model or f'random weights of shape {config.shape}'}"
    yield f"nodes:      {config.prefill} prefill and {config.decode} decode, on {_cores()} cores"
    if len(plan.tunings) > 1 and COLOCATED in plan.modes:
        yield f"tunings:    {len(plan.tunings)} of {COLOCATED}, the best of which is compared"
    rates = ", ".join(f"{rate:g}/s" for rate in plan.rates) or "found around the modes' capacity"
    least = f"of {plan.duration_s:g} s and {plan.least_requests} requests at least"
    yield f"rates:      {rates}; runs {least}"
    yield f"promises:   kept for {plan.target:.0%} of requests is goodput"
    limit = f"{minutes(plan.budget_s)}, but each kind of requests is measured at one rate at least"
    yield f"time limit: {limit}; less if all is certain before"
    yield f"results:    {folder}"
    if isinstance(load_average, float) and (warning := busy_warning(load_average)):
        yield warning


def busy_warning(load_average: float) -> str:
    """A line, if the machine is at work already; else empty."""
    cores = _cores()
    if load_average <= _BUSY * cores:
        return ""
    return (
        f"warning: this machine is busy already (load {load_average:.1f} on {cores} cores): what "
        "else runs is measured, too; end it, or do not trust the figures"
    )


def minutes(seconds: float) -> str:
    """A duration as "9:20 min", or in seconds if it is short."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02} min"


def _cores() -> int:
    return len(os.sched_getaffinity(0))


_BAR = 30  # characters


class Progress:
    """A line per step on stderr; on a terminal, a bar below them. Use as a context."""

    def __init__(self, budget_s: float, clock: Clock, console: Console | None = None) -> None:
        self._budget_s = budget_s
        self._clock = clock
        self._console = console or Console(stderr=True)
        self._began_s = clock.now()
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._bar,
                console=self._console,
                refresh_per_second=2,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, text: str) -> None:
        """Say what is done from now on."""
        passed = minutes(self._elapsed_s())
        told = f"[{passed}] {text}"
        self._console.print(told, style="dim", highlight=False, markup=False, soft_wrap=True)

    def _elapsed_s(self) -> float:
        return self._clock.now() - self._began_s

    def _bar(self) -> RenderableType:
        elapsed_s = self._elapsed_s()
        left_s = max(0.0, self._budget_s - elapsed_s)
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(self._budget_s, min(elapsed_s, self._budget_s), width=_BAR)
        told = f"{minutes(left_s)} left at most" if left_s else "ends with what has begun"
        line.add_row(bar, f"{minutes(elapsed_s)}, {told}; Ctrl-C reports what there is")
        return line
