"""What a stream can still make up for, where a time is infinite."""

from __future__ import annotations

from math import inf

import pytest

from decode_node.policies.pace import Pace
from tests.unit.decode_node.batches import Batch


@pytest.mark.parametrize("num_tokens_left", [-1.0, 0.0, 5.0])
def test_a_stream_without_any_pace_is_never_late(num_tokens_left: float) -> None:
    batch = Batch()
    pace = Pace(batch.perf, batch.clock, inf)
    stream = batch.decoding()
    assert pace.catches_up(stream, num_tokens_left)
    assert pace._bears_s(stream, num_tokens_left) == inf


@pytest.mark.parametrize(
    ("decode_ratio", "tpot_s", "expected"),
    [
        pytest.param(1.0, 0.020, 0.018, id="kept"),
        pytest.param(1.5, 0.020, 0.018, id="kept, slowed down"),
        pytest.param(4.0, 0.020, 0.072, id="not at the moment: batches as without the slowdown"),
        pytest.param(1.0, 0.001, inf, id="never"),
        pytest.param(4.0, 0.001, inf, id="never, and slowed down"),
    ],
)
def test_how_long_steps_may_take(decode_ratio: float, tpot_s: float, expected: float) -> None:
    batch = Batch()
    batch.perf.decode_ratio = decode_ratio
    pace = Pace(batch.perf, batch.clock, 0.25)
    assert pace.cap_s(batch.decoding(tpot_s=tpot_s)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tpot_s", "late_s", "num_tokens_left", "expected"),
    [
        (0.020, 0.0, 0.0, True),
        (0.020, 0.1, 5.0, False),
        (0.020, 0.1, 50.0, True),
        (0.005, 0.0, 50.0, False),  # not even alone
    ],
)
def test_who_catches_up(
    tpot_s: float, late_s: float, num_tokens_left: float, expected: bool
) -> None:
    batch = Batch()
    pace = Pace(batch.perf, batch.clock, 0.25)
    stream = batch.decoding(tpot_s=tpot_s)
    batch.clock.advance(tpot_s + late_s)
    assert pace.catches_up(stream, num_tokens_left) is expected
