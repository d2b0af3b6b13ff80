"""Memory that a node may take: page cache is not lost, and a container has its own limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.node.meminfo import available_bytes, total_bytes

MEMINFO = "MemTotal:  8000 kB\nMemFree:  100 kB\nMemAvailable:  5000 kB\n"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("limit_file", "limit", "total", "available"),
    [
        (None, "", 8000, 5000),
        ("memory.max", "max", 8000, 5000),
        ("memory.max", "6144000", 6000, 5000),
        ("memory.max", "2048000", 2000, 2000),
        ("memory/memory.limit_in_bytes", "2048000", 2000, 2000),
        ("memory/memory.limit_in_bytes", "9223372036854771712", 8000, 5000),
    ],
)
def test_page_cache_counts_as_available_but_not_beyond_the_containers_limit(
    tmp_path: Path, limit_file: str | None, limit: str, total: int, available: int
) -> None:
    write(tmp_path / "proc/meminfo", MEMINFO)
    if limit_file is not None:
        write(tmp_path / "sys/fs/cgroup" / limit_file, limit + "\n")
    assert total_bytes(tmp_path) == total * 1024
    assert available_bytes(tmp_path) == available * 1024


def test_what_is_free_counts_where_nobody_says_more(tmp_path: Path) -> None:
    assert total_bytes(tmp_path) >= available_bytes(tmp_path) > 0
    write(tmp_path / "proc/meminfo", "MemTotal:  8000 kB\n")
    assert available_bytes(tmp_path) > 0
