"""Published request traces as calls: Mooncake's (JSON lines) and Azure's 2023 ones (CSV).

Mooncake, FAST'25: `timestamp` (ms, in ticks of 3 s), `input_length`, `output_length`, `hash_ids`:
one id per 512 tokens, equal exactly if these tokens and all tokens before them are equal. Azure,
Splitwise, ISCA'24: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; no data on prefixes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from random import Random

from pdserve.commands.simulation.call import Call
from pdserve.protocol import Prompt

MOONCAKE_BLOCK = 512
MOONCAKE_TICK_S = 3.0


def read_trace(path: Path, most_calls: int) -> list[Call]:
    """Return the trace's first calls, from second 0 on."""
    with path.open(newline="") as lines:
        read = _mooncake(lines) if path.suffix == ".jsonl" else _azure(lines)
        return sorted(islice(read, most_calls), key=lambda call: call.at_s)


def _mooncake(lines: Iterator[str]) -> Iterator[Call]:
    """Spread the calls evenly over their ticks; otherwise each tick would be a burst of ten."""
    random = Random(1)
    for number, line in enumerate(lines):
        entry = json.loads(line)
        token_ids = [token for block in entry["hash_ids"] for token in [block] * MOONCAKE_BLOCK]
        yield Call(
            call_id=f"mooncake-{number}",
            at_s=entry["timestamp"] / 1000 + random.uniform(0.0, MOONCAKE_TICK_S),
            prompt=Prompt(token_ids[: entry["input_length"]]),
            num_output=entry["output_length"],
        )


def _azure(lines: Iterator[str]) -> Iterator[Call]:
    first: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines)):
        time = datetime.fromisoformat(row["TIMESTAMP"][:26])  # drops the seventh digit
        first = first or time
        yield Call(
            call_id=f"azure-{number}",
            at_s=(time - first).total_seconds(),
            prompt=Prompt([number] * int(row["ContextTokens"])),
            num_output=max(1, int(row["GeneratedTokens"])),
        )
