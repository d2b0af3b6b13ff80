"""The daily pattern of arrivals outlives a coordinator."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from coordinator.admission.arrival_file import ArrivalFile
from coordinator.admission.arrivals import DAY_S, LEAD_S, MOST_CLASSES, Arrivals
from tests.unit.coordinator.admission.test_arrivals import HOUR_S, at_noon, feed

MIDNIGHT_S = 20_000 * DAY_S  # since 1970


def a_day(path: Path) -> Arrivals:
    """Keep what one day had, as a coordinator does that ends at 6 in the next morning."""
    arrivals = feed(Arrivals(), at_noon, 0.0, DAY_S + 6 * HOUR_S)
    file = ArrivalFile(path, arrivals)
    file.save(arrivals.pattern(MIDNIGHT_S + DAY_S + 6 * HOUR_S))
    return arrivals


def test_a_restarted_coordinator_knows_what_comes_at_noon(tmp_path: Path) -> None:
    path = tmp_path / "state" / "arrivals.json"
    former = a_day(path)
    arrivals = Arrivals()
    # It starts an hour later; its monotonic clock may have any value.
    ArrivalFile(path, arrivals, lambda: MIDNIGHT_S + DAY_S + 7 * HOUR_S).load(7 * HOUR_S)
    feed(arrivals, at_noon, 7 * HOUR_S, 12 * HOUR_S - 30)
    assert arrivals.forecast(0.0)[0] == pytest.approx(0.2, abs=0.1)
    assert arrivals.forecast(LEAD_S)[0] == pytest.approx(3.0, abs=0.3)
    rate, busy = arrivals.forecast(LEAD_S)
    assert busy == pytest.approx(0.5 * rate), "how long prompts take is known, too"
    new = feed(Arrivals(), at_noon, 7 * HOUR_S, 12 * HOUR_S - 30)
    assert new.forecast(LEAD_S)[0] == pytest.approx(0.2, abs=0.1), "one without it does not know"
    assert former.forecast(0.0)[0] == pytest.approx(0.2, abs=0.1)


def test_it_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.json"
    arrivals = Arrivals()
    for number in range(MOST_CLASSES + 9):
        arrivals.observe(f"class {number}", 0.5, 0.0)
    pattern = arrivals.pattern(MIDNIGHT_S)
    assert len(pattern.classes) == MOST_CLASSES
    more = {**pattern.classes, "one more": pattern.classes["class 0"]}
    ArrivalFile(path, arrivals).save(msgspec.structs.replace(pattern, classes=more))
    again = Arrivals()
    ArrivalFile(path, again, lambda: MIDNIGHT_S).load(0.0)
    assert len(again.pattern(MIDNIGHT_S).classes) == MOST_CLASSES


@pytest.mark.parametrize(
    "content", [b"{", b'{"at_s": 0, "classes": {"a": {"rates": [1], "prompt_s": 0, "off": {}}}}']
)
def test_a_file_that_is_none_of_ours_costs_the_pattern_and_nothing_else(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "arrivals.json"
    path.write_bytes(content)
    arrivals = Arrivals()
    ArrivalFile(path, arrivals, lambda: MIDNIGHT_S).load(0.0)
    assert not arrivals.are_known
    assert "begins anew" in caplog.text
    assert feed(arrivals, at_noon, 0.0, 60.0).are_known


def test_a_full_disk_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    arrivals = Arrivals()
    file = ArrivalFile(tmp_path / "file" / "arrivals.json", arrivals)
    for _ in range(3):
        file.save(arrivals.pattern(MIDNIGHT_S))
    assert caplog.text.count("cannot be kept") == 1


async def test_it_is_kept_when_the_coordinator_ends(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.json"
    arrivals = feed(Arrivals(), at_noon, 0.0, 300.0)
    async with ArrivalFile(path, arrivals, lambda: MIDNIGHT_S).kept():
        assert not path.exists()
    again = Arrivals()
    ArrivalFile(path, again, lambda: MIDNIGHT_S).load(0.0)
    assert again.pattern(MIDNIGHT_S).classes.keys() == {"chat"}
