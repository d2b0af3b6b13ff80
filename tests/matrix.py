"""The cases of a matrix: `make test` runs those that tell most, `make test-long` all."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def matrix(cases: Iterable[object], num_always: int) -> list[object]:
    """Cases for `parametrize`; all but the first ones are long. A tuple is several arguments."""
    listed = list(cases)
    assert 0 < num_always < len(listed), "nothing of it is long"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.long] if number >= num_always else [],
        )
        for number, case in enumerate(listed)
    ]
