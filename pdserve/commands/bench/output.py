"""What a benchmark says: on stderr what it is at, on stdout what it has found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from rich.console import Console, RenderableType

_WIDTH = 200  # of tables where no terminal says how wide it is


def say(text: str) -> None:
    """Show what is being done."""
    console = Console(stderr=True)
    console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def print_json(report: msgspec.Struct, setup: Mapping[str, object]) -> None:
    """For programs: the report's fields, and under "setup" the conditions it was made under."""
    print(msgspec.json.encode({**msgspec.to_builtins(report), "setup": setup}).decode())


def print_tables(tables: Iterable[RenderableType], remarks: Iterable[str] = ()) -> None:
    """For people."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for table in tables:
        console.print(table)
    for remark in remarks:
        console.print(remark, highlight=False, soft_wrap=True)


def machine_and_date(setup: Mapping[str, object]) -> str:
    """Return what every table must name: processor, cores, our kernels, and the date."""
    machine = setup["machine"]
    assert isinstance(machine, dict)
    processor, cores = machine["processor"], machine["cores"]
    return f"{processor}, cores: {cores}, kernels: {setup['kernels']}, {setup['at']}"
