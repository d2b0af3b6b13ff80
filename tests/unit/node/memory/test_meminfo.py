"""Memory that a node may take: page cache is not lost, and a container has its own limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.node.memory.meminfo import available_bytes, total_bytes

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


@pytest.mark.parametrize(
    ("folder", "names", "cache"),
    [
        ("", ("memory.max", "memory.current"), "inactive_file"),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"),
    ],
    ids=["version 2", "version 1"],
)
@pytest.mark.parametrize(
    ("limit_kb", "used_kb", "cache_kb", "available_kb"),
    [
        (4000, 1000, 0, 3000),
        (4000, 3000, 2500, 3500),  # page cache is given back
        (4000, 4096, 0, 0),
        (7000, 1000, 0, 5000),  # the machine has no more
    ],
)
def test_what_a_container_uses_is_not_available_unless_it_is_page_cache(
    tmp_path: Path,
    folder: str,
    names: tuple[str, str],
    cache: str,
    limit_kb: int,
    used_kb: int,
    cache_kb: int,
    available_kb: int,
) -> None:
    cgroup = tmp_path / "sys/fs/cgroup" / folder
    write(tmp_path / "proc/meminfo", MEMINFO)
    for name, size_kb in zip(names, (limit_kb, used_kb), strict=True):
        write(cgroup / name, f"{size_kb * 1024}\n")
    write(cgroup / "memory.stat", f"anon 7\n{cache} {cache_kb * 1024}\nactive_file 5\n")
    assert total_bytes(tmp_path) == limit_kb * 1024
    assert available_bytes(tmp_path) == available_kb * 1024


def test_what_is_free_counts_where_nobody_says_more(tmp_path: Path) -> None:
    assert total_bytes(tmp_path) >= available_bytes(tmp_path) > 0
    write(tmp_path / "proc/meminfo", "MemTotal:  8000 kB\n")
    assert available_bytes(tmp_path) > 0
