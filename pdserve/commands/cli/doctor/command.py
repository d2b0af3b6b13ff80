"""`pdserve doctor`: checks this machine, and says what missing things would be needed for."""

from __future__ import annotations

import json
from itertools import groupby

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdserve.commands.cli.doctor.caches import cache_components
from pdserve.commands.cli.doctor.component import Availability, Component
from pdserve.commands.cli.doctor.devices import (
    attention_components,
    gpu_components,
    rdma_components,
)
from pdserve.commands.cli.doctor.kv_formats import kv_format_components
from pdserve.commands.cli.doctor.machine import machine_components
from pdserve.commands.cli.doctor.software import native_components, software_components
from pdserve.commands.cli.doctor.transports import transport_components
from pdserve.shared.process.exit_codes import FAILED, OK

_MARKS = {
    Availability.OK: Text("ok", "green"),
    Availability.ABSENT: Text("absent", "yellow"),
    Availability.BROKEN: Text("BROKEN", "bold red"),
}


def run(*, as_json: bool) -> int:
    """Check everything and print it; the exit code is 1 if pdserve cannot work here."""
    components = collect()
    if as_json:
        print(json.dumps(msgspec.to_builtins(components), indent=2))
    else:
        Console().print(render(components))
    return FAILED if any(found.verdict is Availability.BROKEN for found in components) else OK


def collect() -> list[Component]:
    """All components, topic by topic."""
    return [
        *machine_components(),
        *native_components(),
        *kv_format_components(),
        *gpu_components(),
        *attention_components(),
        *transport_components(),
        *rdma_components(),
        *cache_components(),
        *software_components(),
    ]


def render(components: list[Component]) -> RenderableType:
    """One table per topic."""
    return Group(
        *(
            _table(topic, list(found))
            for topic, found in groupby(components, key=lambda found: found.topic)
        )
    )


def _table(topic: str, components: list[Component]) -> Table:
    table = Table(
        title=topic, title_justify="left", title_style="bold", show_header=False, box=None
    )
    table.add_column(width=8)
    table.add_column(min_width=18, no_wrap=True)
    table.add_column()
    for found in components:
        text = Text(found.detail)
        if found.verdict is not Availability.OK and found.needed_for:
            text.append(f"; needed for {found.needed_for}", "dim")
        table.add_row(_MARKS[found.verdict], found.name, text)
    return table
