"""Published traces are read as they are meant, from tiny samples of both formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.bench.load.traces import MOONCAKE_TICK_S, TraceRow, mean_rate, read_trace
from pdserve.errors import ConfigError

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.6805901,396,0\r\n"
    "2023-11-16 18:15:48.1805900,879,55\r\n"
)


def mooncake(*rows: tuple[float, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, newline="")
    return path


def test_azure_times_are_in_order_and_from_the_first_one(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, AZURE), seed=0)
    assert [row.at_s for row in rows] == pytest.approx([0.0, 1.5, 4.0])
    lengths = [(row.num_prompt, row.num_output) for row in rows]
    assert lengths == [(374, 44), (879, 55), (396, 1)]  # an answer has a token at least
    assert mean_rate(rows) == pytest.approx(2 / 4)


def test_azure_times_of_2024_have_an_offset_and_some_no_fraction(tmp_path: Path) -> None:
    rows = (
        "2024-05-10 00:00:00+00:00,10,2\n\n"  # an empty line is no request
        "2024-05-10 00:00:01.500000+00:00,11,2\n"
    )
    read = read_trace(write(tmp_path, AZURE.splitlines()[0] + "\n" + rows), seed=0)
    assert [(row.at_s, row.num_prompt) for row in read] == [(0.0, 10), (1.5, 11)]


def test_mooncake_ticks_are_spread_by_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(*[(3000 * (i // 10), 600, 5, [0, i + 1]) for i in range(40)]))
    rows = read_trace(path, seed=7)
    assert rows == read_trace(path, seed=7)
    assert rows != read_trace(path, seed=8)
    assert len({row.at_s for row in rows}) == 40
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)
    for row in rows:  # the first one, which is at 0, was delayed by less than a tick
        tick_s = MOONCAKE_TICK_S * ((row.blocks[1] - 1) // 10)
        assert tick_s - MOONCAKE_TICK_S < row.at_s < tick_s + MOONCAKE_TICK_S


def test_mooncake_blocks_are_kept(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, mooncake((0, 513, 5, [0, 9]), (60_000, 512, 5, [0]))), 0)
    assert [row.blocks for row in rows] == [(0, 9), (0,)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a,b\n1,2\n", "is not a trace"),
        ("", "is not a trace"),
        (mooncake((0, 513, 5, [0])), "line 1: 1 hash_ids cannot stand for 513"),
        (mooncake((0, 5, 5, [0])) + "{\n", "line 2"),
        (AZURE + "soon,1,2\n", "line 5"),
        (AZURE + "2023-11-16 18:15:46.6805900,1\n", "line 5"),
        (AZURE + "2023-11-16 18:15:46.6805900,-1,1\n", "line 5: lengths must not be negative"),
        (mooncake((0, 0, -5, [])), "line 1: lengths must not be negative"),
        (AZURE[:75], "have no rate"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_trace(write(tmp_path, text), seed=0)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "none", seed=0)


def test_the_rate_is_that_of_the_gaps() -> None:
    assert mean_rate([TraceRow(1.0, 1, 1), TraceRow(2.0, 1, 1), TraceRow(5.0, 1, 1)]) == 0.5
