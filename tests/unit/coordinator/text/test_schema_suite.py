"""The JSON-Schema-Test-Suite: no invalid instance is let through, and most schemas are enforced.

The suite is in `json_schema_suite.json`, with its license.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pdserve.shared.errors import GrammarFailed, InvalidRequest
from tests.matrix import matrix
from tests.unit.coordinator.text.enforced import Enforced

FILES: dict[str, list[Any]] = json.loads(
    (Path(__file__).parent / "json_schema_suite.json").read_text(encoding="utf-8")
)["files"]
LET_THROUGH: set[tuple[str, str, str]] = set()  # file, schema, instance


def run(name: str) -> Counter[str]:
    """How many instances were judged how; asserts that none is let through."""
    found: Counter[str] = Counter()
    for described, schema, tests in FILES[name]:
        try:
            made = Enforced(schema)
        except (InvalidRequest, GrammarFailed):
            found["refused"] += len(tests)
            continue
        for instance, value, is_valid in tests:
            is_taken = made.takes_value(value)
            found["taken" if is_taken else "narrowed" if is_valid else "kept out"] += 1
            wrong = is_taken and not is_valid
            assert wrong == ((name, described, instance) in LET_THROUGH), (described, instance)
    return found


@pytest.mark.parametrize("name", matrix(FILES, 20))
def test_no_invalid_instance_is_let_through(name: str) -> None:
    run(name)


def test_most_of_the_suite_is_enforced() -> None:
    found = sum(map(run, FILES), Counter[str]())
    assert found["taken"] > 600
    assert found["kept out"] > 550
    assert found["narrowed"] < 80
    assert found["refused"] < 950
