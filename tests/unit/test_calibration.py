"""Calibration files: what is written is read again, and what is none is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdserve.kv import KvDtype
from pdserve.measured.calibration import (
    Calibration,
    HeldOutErrors,
    ModelShape,
    NodeLimits,
    Range,
    Ranges,
    Residuals,
    Sharing,
    read_calibration,
    write_calibration,
)
from pdserve.protocol import StepCosts, TransferCosts
from pdserve.shared.errors import CalibrationError

COSTS = StepCosts(knot_tokens=[1, 64], knot_s=[0.004, 0.03], pair_s=1e-7, context_s=3e-7)
MEASURED = Calibration(
    date="2026-11-23T12:00:00Z",
    device="a processor",
    cpus=1,
    model="random-50m",
    shape=ModelShape(8, 512, 4, 64, 32000, KvDtype.BFLOAT16, 64, 100_000_000),
    limits=NodeLimits(2048, 512, 64, 8192),
    prefill=COSTS,
    decode=COSTS,
    mixed=COSTS,
    pull=TransferCosts(transport="shm", fixed_s=0.001, bytes_per_s=5e9),
    residuals=Residuals(prefill=[[0.98, 1.03]]),
    ranges=Ranges(Range(1, 8000), Range(1, 64), Range(1, 8192)),
    errors=HeldOutErrors(0.03, 0.02, 0.05, 0.1),
    host=Sharing(decode_beside_decode=1.5),
)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    write_calibration(MEASURED, path)
    assert read_calibration(path) == MEASURED
    assert MEASURED.shape.layout.token_bytes == 2 * 8 * 4 * 64 * 2
    assert [p.name for p in tmp_path.iterdir()] == ["node.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 1}, "version 1, and this pdserve reads versions 3 and 4"),
        ({"colour": "red"}, "unknown field `colour`"),
        ({"ranges": {"batch": [1, 2], "context": [1, 2]}}, "prompt_tokens"),
        ({"residuals": {"decode": [[0.0]]}}, "> 0"),
        ({"mixed": {"knot_tokens": [8, 4], "knot_s": [1, 2]}}, "knots must be positive and rise"),
        ({"pull": {"transport": "tcp", "fixed_s": 0, "bytes_per_s": 0}}, "above 0"),
    ],
)
def test_what_is_no_calibration_is_refused(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    path = tmp_path / "node.json"
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(MEASURED) | change))
    with pytest.raises(CalibrationError, match=said):
        read_calibration(path)


def test_a_file_of_the_version_before_is_read(tmp_path: Path) -> None:
    """It does not say how often something is guessed, so nothing is."""
    made = msgspec.to_builtins(MEASURED)
    del made["drafts"]
    path = tmp_path / "node.json"
    path.write_bytes(msgspec.json.encode(made | {"version": 3, "drafts_right": 0.5}))
    assert read_calibration(path) == MEASURED


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"cannot read the calibration .*none\.json"):
        read_calibration(tmp_path / "none.json")
