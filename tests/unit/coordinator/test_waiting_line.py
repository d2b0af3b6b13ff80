"""First come, first served, up to so many."""

from __future__ import annotations

import pytest

from coordinator.admission import WaitingLine


def line_of(*names: str, max_waiting: int = 3) -> WaitingLine[str]:
    line = WaitingLine[str](max_waiting)
    for number, name in enumerate(names):
        line.join(name, name.upper(), float(number))
    return line


def test_the_first_to_come_is_the_head() -> None:
    line = line_of("a", "b", "c")
    heads = []
    while line.head is not None:
        heads.append(line.head)
        line.leave(line.head.lower())
    assert heads == ["A", "B", "C"]
    assert len(line) == 0


def test_anybody_may_leave_once_or_twice() -> None:
    line = line_of("a", "b", "c")
    line.leave("b")
    line.leave("b")
    line.leave("a")
    assert line.head == "C"
    assert "b" not in line
    assert "c" in line


def test_a_full_line_takes_nobody() -> None:
    line = line_of("a", "b", max_waiting=2)
    assert line.is_full
    with pytest.raises(ValueError, match="c cannot join a line of 2"):
        line.join("c", "C", 0.0)
    line.leave("a")
    line.join("c", "C", 0.0)
    assert line.head == "B"


def test_nobody_is_in_it_twice() -> None:
    line = line_of("a")
    with pytest.raises(ValueError, match="a cannot join"):
        line.join("a", "A", 1.0)


def test_the_pace_is_what_the_head_has_waited_for_over_all_places() -> None:
    assert line_of().advance_s(9.0) == 0.0
    assert line_of("a", "b", "c").advance_s(9.0) == 3.0
