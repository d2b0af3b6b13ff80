"""What is written down, and read back."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree

import msgspec
import pytest

from coordinator.tenants.ledger import HOUR_S, Account, Amounts, Ledger
from coordinator.tenants.report import UsageRow, read_usage
from pdserve.commands.cli.main import main
from pdserve.shared.errors import ConfigError
from tests.full_disk import full_disk

NOON = int(datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()) // HOUR_S


def unflushed(path: Path) -> Ledger:
    """Nothing is written by itself until it is closed, and nothing is waited for."""
    return Ledger(path, flush_s=60.0, busy_s=0.01)


def filled(path: Path) -> Path:
    ledger = Ledger(path)
    ledger.add(Account(NOON, "acme", "k1", "m"), Amounts(1, 0, 100, 40, 7))
    ledger.add(Account(NOON, "acme", "k1", "m"), Amounts(1, 1, 0, 0, 0))
    ledger.add(Account(NOON, "acme", "k2", "m"), Amounts(1, 0, 10, 0, 1))
    ledger.add(Account(NOON + 24, "nightly", "k3", "m"), Amounts(1, 0, 5, 0, 2))
    ledger.close()
    return path


def test_amounts_add_up(tmp_path: Path) -> None:
    path = filled(tmp_path / "deep" / "usage.sqlite")
    filled(path)  # a coordinator's next life
    assert read_usage(path, "tenant") == [
        UsageRow("acme", 6, 2, 220, 80, 16),
        UsageRow("nightly", 2, 0, 10, 0, 4),
    ]
    assert [row.group for row in read_usage(path, "key")] == ["acme/k1", "acme/k2", "nightly/k3"]
    assert [row.group for row in read_usage(path, "day")] == ["2026-01-31", "2026-02-01"]
    assert [row.group for row in read_usage(path, "hour", tenant="acme")] == ["2026-01-31 12:00"]
    since = datetime(2026, 2, 1, tzinfo=UTC)
    assert [row.group for row in read_usage(path, "tenant", since=since)] == ["nightly"]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_full_disk_keeps_no_coordinator_from_starting(tmp_path: Path, *, is_new: bool) -> None:
    """What is used meanwhile is written when there is room."""
    path = tmp_path / "usage.sqlite"
    if not is_new:
        filled(path)
    with full_disk():
        ledger = Ledger(path)
    ledger.add(Account(NOON, "acme", "k1", "m"), Amounts(1))
    ledger.close()
    assert read_usage(path, "tenant")[0].requests == (1 if is_new else 4)


def test_two_coordinators_may_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    ledgers = [Ledger(path), Ledger(path)]
    for ledger in ledgers:
        ledger.add(Account(NOON, "acme", "k1", "m"), Amounts(1))
    for ledger in ledgers:
        ledger.close()
    assert read_usage(path, "tenant")[0].requests == 2


def test_what_cannot_be_written_now_is_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "usage.sqlite"
    ledger = unflushed(path)
    ledger.add(Account(NOON, "acme", "k1", "m"), Amounts(1))
    with sqlite3.connect(path) as other:
        other.execute("BEGIN EXCLUSIVE")
        for _ in range(3):
            ledger._flush()
        other.rollback()
    other.close()
    ledger.close()
    assert read_usage(path, "tenant")[0].requests == 1
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in told] == [
        "usage cannot be written, and is kept in memory",
        "usage is written again",
    ]


def test_what_can_never_be_written_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    ledger = unflushed(folder / "usage.sqlite")
    ledger.add(Account(NOON, "acme", "k1", "m"), Amounts(2))
    ledger.add(Account(NOON, "acme", "k2", "m"), Amounts(1))
    rmtree(folder)
    ledger.close()
    assert caplog.records[-1].getMessage() == "the usage of 3 requests is lost: see above"


def test_a_file_that_is_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    ledger = unflushed(path)
    path.rename(tmp_path / "january.sqlite")
    ledger.add(Account(NOON, "acme", "k1", "m"), Amounts(1))
    ledger.close()
    assert read_usage(path, "tenant")[0].requests == 1


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    path.write_text("not a database, and long enough to be looked at" * 100)
    with pytest.raises(ConfigError, match=r"usage\.sqlite: .*access.usage_db to a file .* memory"):
        Ledger(path)
    with pytest.raises(ConfigError, match=r"usage\.sqlite"):
        read_usage(path, "tenant")


def test_the_command_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = filled(tmp_path / "usage.sqlite")
    assert main(["usage", str(path), "--by", "tenant", "--json"]) == 0
    shown = msgspec.json.decode(capsys.readouterr().out)
    assert [row["group"] for row in shown["rows"]] == ["acme", "nightly"]
    assert main(["usage", str(path), "--since", "2026-02-01"]) == 0
    assert "nightly" in capsys.readouterr().out
    assert main(["usage", str(path), "--since", "yesterday"]) != 0
    assert "2026-01-31" in capsys.readouterr().err
    assert main(["usage", str(tmp_path / "none")]) != 0
