"""The cases of a matrix: `make test` runs those that tell most, `make test-long` all."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest
from hypothesis import settings

ALL_EXAMPLES = 100  # what hypothesis tries by default


def matrix(cases: Iterable[object], always: int | Collection[object]) -> list[object]:
    """Cases for `parametrize`; all but the first ones, or those named, are long.

    A tuple is several arguments.
    """
    listed = list(cases)
    kept = {*range(always)} if isinstance(always, int) else {*map(listed.index, always)}
    assert 0 < len(kept) < len(listed), "nothing of it is long"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if number in kept else [pytest.mark.long],
        )
        for number, case in enumerate(listed)
    ]


def examples(num: int) -> int:
    """Return so many in `make test-long`, and 15 % of it in `make test` (tests/conftest.py)."""
    return max(2, num * settings.default.max_examples // ALL_EXAMPLES)
