"""Each fault that docs/FIELD.md tells of has a test, which is there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.repository import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/FIELD.md").read_text().splitlines()
    if "::" in line
]
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_there_are_ten_faults_each_of_its_own() -> None:
    assert len(ROWS) >= 10
    assert all(re.fullmatch(r"[\w.-]+#\d+", row[1]) for row in ROWS)
    for column in (1, 3):
        assert len({row[column] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row[1] for row in ROWS])
def test_its_test_is_there(row: list[str]) -> None:
    found = _TEST.fullmatch(row[3])
    assert found, row[3]
    tree = ast.parse((ROOT / found[1]).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert found[2] in {node.name for node in tree.body if isinstance(node, functions)}
