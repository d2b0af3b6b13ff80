"""What a comparison is at, and how much of its time is left at most."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from pdserve.commands.bench.compare.announcement import minutes
from pdserve.shared.clock import Clock

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
