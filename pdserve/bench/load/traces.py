"""Request traces: arrival times, lengths, and shared prefixes of requests.

Three formats are supported. None contains text.

* Our own, as `pdserve record` writes it: JSON lines, the first of which is a `TraceHeader`, the
  others `TraceLine`s. A request may follow another one, after a time to think.
* Mooncake (FAST'25), one JSON object per line: `timestamp` in ms, `input_length`, `output_length`,
  and `hash_ids`, one per block of 512 prompt tokens; equal ids stand for equal blocks after equal
  prefixes. Timestamps are rounded to ticks of 3 s; replayed unchanged, every tick would be a burst
  of ten. So each request gets a random delay within its tick.
* Azure LLM inference 2023 (Splitwise, ISCA'24) and 2024, CSV with a header: `TIMESTAMP`,
  `ContextTokens`, `GeneratedTokens`. There is no information on prefixes.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from pdserve.errors import ConfigError
from pdserve.measured.trace_lines import TraceHeader, TraceLine

MOONCAKE_BLOCK = 512  # prompt tokens per hash id
MOONCAKE_TICK_S = 3.0
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
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
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
    decoder = msgspec.json.Decoder(TraceLine)
    rows: list[TraceRow] = []
    places: dict[int, int] = {}  # id |-> index
    for number, line in enumerate(lines[1:], start=2):
        try:
            read = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if min(read.input_length, read.output_length, read.think_s) < 0:
            raise ConfigError(f"{path}, line {number}: nothing in it may be negative")
        places[read.id] = len(rows)
        rows.append(
            TraceRow(
                read.timestamp / 1e3,
                read.input_length,
                read.output_length,
                tuple(read.hash_ids),
                header.block_tokens,
                read.slo_class or "trace",
                None if read.follows is None else places.get(read.follows),
                read.think_s,
            )
        )
    return rows


class _MooncakeLine(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]


def _mooncake_rows(path: Path, lines: list[str], seed: int) -> list[TraceRow]:
    rng = np.random.default_rng(seed)
    decoder = msgspec.json.Decoder(_MooncakeLine)
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            read = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if min(read.input_length, read.output_length) < 0:
            raise ConfigError(f"{path}, line {number}: lengths must not be negative")
        if len(read.hash_ids) != -(-read.input_length // MOONCAKE_BLOCK):
            raise ConfigError(
                f"{path}, line {number}: {len(read.hash_ids)} hash_ids cannot stand for "
                f"{read.input_length} tokens in blocks of {MOONCAKE_BLOCK}"
            )
        at_s = read.timestamp / 1e3 + rng.uniform(0, MOONCAKE_TICK_S)
        rows.append(TraceRow(at_s, read.input_length, read.output_length, tuple(read.hash_ids)))
    return rows


def _azure_rows(path: Path, lines: list[str]) -> list[TraceRow]:
    rows = []
    for number, line in enumerate(csv.reader(lines[1:]), start=2):
        if not line:
            continue
        try:
            at, num_prompt, num_output = line
            row = TraceRow(_azure_seconds(at), int(num_prompt), int(num_output))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if min(row.num_prompt, row.num_output) < 0:
            raise ConfigError(f"{path}, line {number}: lengths must not be negative")
        rows.append(row)
    return rows


def _azure_seconds(at: str) -> float:
    """Return a timestamp of 2023 (UTC without saying so, 7 digits) or 2024 (with an offset)."""
    time = datetime.fromisoformat(at)  # drops a seventh digit
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
