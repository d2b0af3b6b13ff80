"""Memory that a node may take: the page cache's is not lost."""

from __future__ import annotations

from pathlib import Path

from pdserve.node.meminfo import available_bytes


def test_the_page_cache_counts_as_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  8000 kB\nMemFree:  100 kB\nMemAvailable:  5000 kB\n")
    assert available_bytes(meminfo) == 5000 * 1024


def test_what_is_free_counts_where_nobody_says_more(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "nothing") > 0
    (tmp_path / "old").write_text("MemTotal:  8000 kB\n")
    assert available_bytes(tmp_path / "old") > 0
