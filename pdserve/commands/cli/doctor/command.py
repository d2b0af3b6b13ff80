"""`pdserve doctor`: checks this machine, and says what missing things would be needed for."""

from __future__ import annotations

import json
from itertools import groupby

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdserve.commands.cli.doctor.caches import cache_findings
from pdserve.commands.cli.doctor.devices import attention_findings, gpu_findings, rdma_findings
from pdserve.commands.cli.doctor.finding import Finding, Verdict
from pdserve.commands.cli.doctor.kv_formats import kv_format_findings
from pdserve.commands.cli.doctor.machine import machine_findings
from pdserve.commands.cli.doctor.software import native_findings, software_findings
from pdserve.commands.cli.doctor.transports import transport_findings
from pdserve.shared.process.exit_codes import FAILED, OK

_MARKS = {
    Verdict.OK: Text("ok", "green"),
    Verdict.ABSENT: Text("absent", "yellow"),
    Verdict.BROKEN: Text("BROKEN", "bold red"),
}


def run(*, as_json: bool) -> int:
    """Check everything and print it; the exit code is 1 if pdserve cannot work here."""
    findings = collect()
    if as_json:
        print(json.dumps(msgspec.to_builtins(findings), indent=2))
    else:
        Console().print(render(findings))
    return FAILED if any(found.verdict is Verdict.BROKEN for found in findings) else OK


def collect() -> list[Finding]:
    """All findings, topic by topic."""
    return [
        *machine_findings(),
        *native_findings(),
        *kv_format_findings(),
        *gpu_findings(),
        *attention_findings(),
        *transport_findings(),
        *rdma_findings(),
        *cache_findings(),
        *software_findings(),
    ]


def render(findings: list[Finding]) -> RenderableType:
    """One table per topic."""
    return Group(
        *(
            _table(topic, list(found))
            for topic, found in groupby(findings, key=lambda found: found.topic)
        )
    )


def _table(topic: str, findings: list[Finding]) -> Table:
    table = Table(
        title=topic, title_justify="left", title_style="bold", show_header=False, box=None
    )
    table.add_column(width=8)
    table.add_column(min_width=18, no_wrap=True)
    table.add_column()
    for found in findings:
        text = Text(found.detail)
        if found.verdict is not Verdict.OK and found.needed_for:
            text.append(f"; needed for {found.needed_for}", "dim")
        table.add_row(_MARKS[found.verdict], found.name, text)
    return table
