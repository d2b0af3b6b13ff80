"""What a benchmark says: on stderr what it is at, on stdout what it has found."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from rich.console import Console, RenderableType

_WIDTH = 200  # of tables where no terminal says how wide it is


def say(text: str) -> None:
    """Show what is being done."""
    Console(stderr=True).print(text, style="dim", highlight=False)


def print_json(report: object) -> None:
    """For programs."""
    print(msgspec.json.encode(report).decode())


def print_tables(tables: Iterable[RenderableType], remarks: Iterable[str] = ()) -> None:
    """For people."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for table in tables:
        console.print(table)
    for remark in remarks:
        console.print(remark, highlight=False, soft_wrap=True)
