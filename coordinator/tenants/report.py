"""Reads usage reports from the ledger's file."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from coordinator.tenants.ledger import HOUR_S, connected
from pdserve.shared.errors import ConfigError

By = Literal["tenant", "key", "model", "day", "hour"]

_GROUPS: dict[By, str] = {
    "tenant": "tenant",
    "key": "tenant || '/' || key_id",
    "model": "model",
    "day": "hour / 24",
    "hour": "hour",
}


class UsageRow(msgspec.Struct, frozen=True):
    """One row of a usage report."""

    group: str
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


def read_usage(
    path: Path, by: By, *, tenant: str = "", since: datetime | None = None
) -> list[UsageRow]:
    """Return usage by group, sorted by group; optionally of one tenant or since an hour only.

    Raises:
        ConfigError: there is no readable ledger at `path`.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}: give the coordinator's access.usage_db")
    query = (
        f"SELECT {_GROUPS[by]} AS what, sum(requests), sum(failed), sum(prompt_tokens), "
        "sum(cached_tokens), sum(output_tokens) FROM usage "
        "WHERE hour >= ? AND (? = '' OR tenant = ?) GROUP BY what ORDER BY what"
    )
    first_hour = 0 if since is None else int(since.timestamp()) // HOUR_S
    try:
        with connected(path) as database:
            rows = database.execute(query, (first_hour, tenant, tenant)).fetchall()
    except sqlite3.Error as error:
        raise ConfigError(f"cannot read usage from {path}: {error}") from error
    return [UsageRow(_name(by, row[0]), *row[1:]) for row in rows]


def _name(by: By, group: object) -> str:
    match by, group:
        case "day", int():
            return datetime.fromtimestamp(group * 24 * HOUR_S, UTC).strftime("%Y-%m-%d")
        case "hour", int():
            return datetime.fromtimestamp(group * HOUR_S, UTC).strftime("%Y-%m-%d %H:00")
    return str(group) or "(anybody)"
