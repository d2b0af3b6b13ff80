"""`pdserve usage`: reports the usage of each tenant."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from coordinator.tenants.report import By, UsageRow, read_usage
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.exit_codes import OK


def run(path: Path, by: By, *, tenant: str, since: str, as_json: bool) -> int:
    """Print the usage recorded in the file; the exit code.

    Raises:
        ConfigError: there is no such file, or `since` is not a date.
    """
    rows = read_usage(path, by, tenant=tenant, since=_moment(since))
    if as_json:
        print(msgspec.json.encode({"by": by, "rows": rows}).decode())
        return OK
    Console().print(_table(by, rows))
    return OK


def _moment(since: str) -> datetime | None:
    if not since:
        return None
    try:
        moment = datetime.fromisoformat(since)
    except ValueError as error:
        raise ConfigError(
            f"--since {since}: write it as 2026-01-31, or 2026-01-31T12:00"
        ) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _table(by: By, rows: list[UsageRow]) -> Table:
    table = Table(box=None)
    table.add_column(by)
    for what in ("requests", "failed", "prompt tokens", "cached", "output tokens"):
        table.add_column(what, justify="right")
    for row in rows:
        _, *amounts = msgspec.structs.astuple(row)
        table.add_row(row.group, *(f"{amount:,}" for amount in amounts))
    return table
