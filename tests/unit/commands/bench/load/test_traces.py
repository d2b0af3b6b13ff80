"""Published traces are read as they are meant, from tiny samples of both formats."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from pdserve.commands.bench.load.traces import MOONCAKE_TICK_S, TraceRow, mean_rate, read_trace
from pdserve.shared.errors import ConfigError

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


def test_times_that_are_not_rounded_stay_in_order(tmp_path: Path) -> None:
    """As in Mooncake's synthetic trace: a turn would else come before the one that it extends."""
    times_ms = [0, 0, 40, 277, 471, 472, 60_000]
    rows = read_trace(write(tmp_path, mooncake(*[(at, 5, 5, [at]) for at in times_ms])), seed=3)
    assert [row.blocks[0] for row in rows] == times_ms
    assert [row.at_s * 1e3 for row in rows] == pytest.approx(times_ms, abs=1.0)


def test_a_trace_from_windows_and_a_compressed_one_are_read_as_they_are(tmp_path: Path) -> None:
    plain = read_trace(write(tmp_path, AZURE), seed=0)
    path = tmp_path / "other"
    path.write_bytes(b"\xef\xbb\xbf" + AZURE.encode())
    assert read_trace(path, seed=0) == plain
    path.write_bytes(gzip.compress(AZURE.encode()))
    assert read_trace(path, seed=0) == plain
    path.write_bytes(gzip.compress(AZURE.encode())[:-9])
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(path, seed=0)


def own(*lines: dict[str, object], block_tokens: int = 16) -> str:
    header = {"format": "pdserve trace 1", "block_tokens": block_tokens}
    usual = {"input_length": 20, "output_length": 5}
    return "".join(json.dumps(line) + "\n" for line in (header, *(usual | one for one in lines)))


def test_conversations_survive_times_out_of_order_and_empty_lines(tmp_path: Path) -> None:
    text = own(
        {"id": 7, "timestamp": 500.0},
        {"id": 3, "timestamp": 0.0},
        {"id": 9, "timestamp": 4000.0, "follows": 7, "think_s": 1.5},
    )
    rows = read_trace(write(tmp_path, text.replace("\n", "\r\n\r\n")), seed=0)
    assert [(row.at_s, row.follows, row.think_s) for row in rows] == [
        (0.0, None, 0.0),
        (0.5, None, 0.0),
        (4.0, 1, 1.5),
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (own(block_tokens=0), "line 1: block_tokens 0: must be 1 or more"),
        (own({"id": 1, "timestamp": 0, "follows": 1}), "line 2: follows 1, an id that no earlier"),
        (own({"id": 1, "timestamp": 0}, {"id": 1, "timestamp": 9}), "line 3: an earlier line has"),
        (own({"id": 1, "timestamp": 0, "input_length": -1}), "line 2: a length of -1 tokens"),
        (
            own({"id": 1, "timestamp": 9}, {"id": 2, "timestamp": 8, "follows": 1}),
            "line 3: follows 1, which had not ended by then",
        ),
        (
            own({"id": 1, "timestamp": 0}, {"id": 2, "timestamp": 1, "follows": 1, "think_s": -1}),
            "line 3: follows 1, which had not ended by then",
        ),
    ],
)
def test_what_no_recording_has_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    """A request that follows itself would never be sent, and nobody would hear of it."""
    with pytest.raises(ConfigError, match=complaint):
        read_trace(write(tmp_path, text), seed=0)


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
        (mooncake((0, 5, 5, [-1])), "line 1: a hash id of -1; must be 0 or more"),
        (AZURE + "soon,1,2\n", "line 5"),
        (AZURE + "2023-11-16 18:15:46.6805900,1\n", "line 5: .* must be TIMESTAMP,ContextTokens"),
        (AZURE + "2023-11-16 18:15:46.6805900,-1,1\n", "line 5: a length of -1 tokens; must be"),
        (AZURE + f"2023-11-16 18:15:46.6805900,{10**12},1\n", "line 5: a length of 1000000000000"),
        (mooncake((0, 0, -5, [])), "line 1: a length of -5 tokens; must be from 0"),
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
