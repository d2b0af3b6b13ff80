"""The table of bounds is what the documents say."""

from __future__ import annotations

from pathlib import Path

from coordinator.bounds import BOUNDS, markdown

_PAGE = Path(__file__).parents[3] / "docs" / "LIMITS.md"


def test_the_page_of_limits_is_made_from_the_table() -> None:
    assert _PAGE.read_text() == markdown(), "python -m coordinator.bounds > docs/LIMITS.md"


def test_each_resource_is_bounded_somewhere_and_says_what_happens() -> None:
    for bound in BOUNDS:
        assert {bound.per_call, bound.per_tenant, bound.in_total} != {"-"}, bound.resource
        assert bound.beyond.strip("- "), bound.resource
