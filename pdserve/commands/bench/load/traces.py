"""Request traces: arrival times, lengths, and shared prefixes of requests.

Three formats are supported. None contains text.

* Our own, as `pdserve record` writes it: JSON lines, the first of which is a `TraceHeader`, the
  others `TraceLine`s. A request may follow another one, after a time to think.
* Mooncake (FAST'25), one JSON object per line: `timestamp` in ms, `input_length`, `output_length`,
  and `hash_ids`, one per block of 512 prompt tokens; equal ids stand for equal blocks after equal
  prefixes. Some have timestamps rounded to ticks of 3 s; replayed unchanged, every tick would be a
  burst of ten. So each request gets a random delay within its tick: the shortest time between two
  timestamps, which is a millisecond where they are not rounded.
* Azure LLM inference 2023 (Splitwise, ISCA'24) and 2024, CSV with a header: `TIMESTAMP`,
  `ContextTokens`, `GeneratedTokens`. There is no information on prefixes.

Files may be compressed with gzip, and have line ends and a byte order mark as on Windows.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from pdserve.measured.trace_lines import TraceHeader, TraceLine
from pdserve.shared.errors import ConfigError

MOONCAKE_BLOCK = 512  # prompt tokens per hash id
MOONCAKE_TICK_S = 3.0  # of the traces that were rounded most
_MOST_TOKENS = 1 << 30  # of a prompt or an answer: what has more is another column
_GZIP = b"\x1f\x8b"
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace."""

    at_s: float  # since the first request
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()  # ids of the prompt's blocks; (): unknown
    block_tokens: int = MOONCAKE_BLOCK  # of each of these, but the last one may be shorter
    kind: str = "trace"
    follows: int | None = None  # index of the request whose end it waits for; None: it does not
    think_s: float = 0.0  # from that end until it is sent


def read_trace(path: Path, seed: int) -> list[TraceRow]:
    """Read a trace's rows in order of time; its first line determines the format.

    Args:
        path: the file.
        seed: of the delays within Mooncake's ticks.

    Raises:
        ConfigError: the file cannot be read, has neither format, or contains impossible values.
    """
    lines = _lines_of(path)
    if lines and lines[0].startswith('{"format"'):
        rows = _own_rows(path, lines)
    elif lines and lines[0].startswith("{"):
        rows = _mooncake_rows(path, lines, seed)
    elif lines and lines[0].split(",") == _AZURE_COLUMNS:
        rows = _azure_rows(path, lines)
    else:
        raise ConfigError(
            f"{path} is not a trace: its first line must be a JSON object (pdserve record, "
            f"Mooncake) or {','.join(_AZURE_COLUMNS)} (Azure)"
        )
    rows = _by_time(rows)
    mean_rate(rows)  # raises if there is none
    first_s = rows[0].at_s
    return [
        replace(
            row,
            at_s=row.at_s - first_s,
            num_prompt=max(1, row.num_prompt),  # traces have a few requests without
            num_output=max(1, row.num_output),
        )
        for row in rows
    ]


def _lines_of(path: Path) -> list[str]:
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
        return content.decode("utf-8-sig").splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error


def mean_rate(rows: Sequence[TraceRow]) -> float:
    """Return the mean rate of these rows, which are in order of time, in requests per second.

    Raises:
        ConfigError: they have none.
    """
    if len(rows) < 2 or rows[-1].at_s == rows[0].at_s:
        raise ConfigError(
            f"the first {len(rows)} requests of the trace have no rate: it needs requests at two "
            "or more times"
        )
    return (len(rows) - 1) / (rows[-1].at_s - rows[0].at_s)


def _by_time(rows: Sequence[TraceRow]) -> list[TraceRow]:
    """Sort rows, which follow each other by index."""
    order = sorted(range(len(rows)), key=lambda index: rows[index].at_s)
    places = {index: place for place, index in enumerate(order)}
    sorted_rows = [rows[index] for index in order]
    return [
        row if row.follows is None else replace(row, follows=places[row.follows])
        for row in sorted_rows
    ]


def _own_rows(path: Path, lines: list[str]) -> list[TraceRow]:
    try:
        header = msgspec.json.decode(lines[0], type=TraceHeader)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}, line 1: {error}") from error
    if header.block_tokens < 1:
        raise ConfigError(f"{path}, line 1: block_tokens {header.block_tokens}: must be 1 or more")
    decoder = msgspec.json.Decoder(TraceLine)
    rows: list[TraceRow] = []
    places: dict[int, int] = {}  # id |-> index
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            read = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{where}: {error}") from error
        row = TraceRow(
            read.timestamp / 1e3,
            read.input_length,
            read.output_length,
            tuple(read.hash_ids),
            header.block_tokens,
            read.slo_class or "trace",
            None if read.follows is None else _followed(where, read, rows, places),
            read.think_s,
        )
        _check_row(where, row)
        if read.id in places:
            raise ConfigError(f"{where}: an earlier line has the id {read.id}, too")
        places[read.id] = len(rows)
        rows.append(row)
    return rows


def _followed(where: str, line: TraceLine, rows: Sequence[TraceRow], places: dict[int, int]) -> int:
    """Return the index of the request that this one follows.

    Raises:
        ConfigError: that one has not ended before, as lines are in the order of their ends.
    """
    assert line.follows is not None
    place = places.get(line.follows)
    if place is None:
        raise ConfigError(f"{where}: follows {line.follows}, an id that no earlier line has")
    if line.think_s < 0 or rows[place].at_s > line.timestamp / 1e3:
        raise ConfigError(f"{where}: follows {line.follows}, which had not ended by then")
    return place


def _check_row(where: str, row: TraceRow) -> None:
    """Raise ConfigError where a request cannot have these lengths or blocks."""
    if min(row.blocks, default=0) < 0:
        raise ConfigError(f"{where}: a hash id of {min(row.blocks)}; must be 0 or more")
    for length in (row.num_prompt, row.num_output):
        if not 0 <= length <= _MOST_TOKENS:
            raise ConfigError(
                f"{where}: a length of {length} tokens; must be from 0 to {_MOST_TOKENS}"
            )


class _MooncakeLine(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]


def _mooncake_rows(path: Path, lines: list[str], seed: int) -> list[TraceRow]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            read = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        row = TraceRow(
            read.timestamp / 1e3, read.input_length, read.output_length, tuple(read.hash_ids)
        )
        _check_row(f"{path}, line {number}", row)
        if len(row.blocks) != -(-row.num_prompt // MOONCAKE_BLOCK):
            raise ConfigError(
                f"{path}, line {number}: {len(row.blocks)} hash_ids cannot stand for "
                f"{row.num_prompt} tokens in blocks of {MOONCAKE_BLOCK}"
            )
        rows.append(row)
    tick_s, rng = _tick_s(rows), np.random.default_rng(seed)
    return [replace(row, at_s=row.at_s + rng.uniform(0, tick_s)) for row in rows]


def _tick_s(rows: Sequence[TraceRow]) -> float:
    """Return what timestamps were rounded to, in seconds."""
    times_s = sorted({row.at_s for row in rows})
    apart_s = (after - before for before, after in pairwise(times_s))
    return min([MOONCAKE_TICK_S, *apart_s])


def _azure_rows(path: Path, lines: list[str]) -> list[TraceRow]:
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            at, num_prompt, num_output = line.split(",")
            row = TraceRow(_azure_seconds(at), int(num_prompt), int(num_output))
        except ValueError as error:
            columns = ",".join(_AZURE_COLUMNS)
            raise ConfigError(f"{path}, line {number}: {error}; must be {columns}") from error
        _check_row(f"{path}, line {number}", row)
        rows.append(row)
    return rows


def _azure_seconds(at: str) -> float:
    """Return a timestamp of 2023 (UTC without saying so, 7 digits) or 2024 (with an offset)."""
    time = datetime.fromisoformat(at)  # drops a seventh digit
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
