"""Grammars that would hold a thread for minutes are told before they do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.grammar.size import excess


@pytest.mark.parametrize(
    "regex",
    [
        "(a{1000}){1000}",
        "((a{200}){200}){200}",
        "a{1000}{1000}",
        "(a{1000}|b){1000,}",
        r"(\{x{1000}){1000}",
        "([)]y{1000}){1000}",
    ],
)
def test_repetitions_inside_of_each_other(regex: str) -> None:
    for part in (
        {"lark_grammar": f"start: /{regex}/"},
        {"json_schema": {"type": "string", "pattern": regex}},
        {"json_schema": {"patternProperties": {regex: {}}}},
    ):
        assert "repetitions" in (excess(json.dumps({"grammars": [part]})) or ""), part


@pytest.mark.parametrize(
    "regex",
    [
        "a{1000000}",
        r"^(\d{3}-){2}\d{4}$",
        "((a{0,100}){0,100}){0,100}",  # of which nothing is written out
        "(a{1000})(b{1000})(c){1000}",
        "[a-z]{1,64}(-[a-z]{1,64}){0,20}",
    ],
)
def test_what_can_be_prepared(regex: str) -> None:
    assert excess(json.dumps(regex)) is None


@pytest.mark.parametrize(
    ("multiple", "fits"),
    [(0.01, True), (1000, True), (9999991, False), (1e400, False)],
)
def test_multiples(multiple: Any, fits: bool) -> None:
    schema = {"items": [{"multipleOf": multiple}]}
    assert (excess(json.dumps({"grammars": [{"json_schema": schema}]})) is None) == fits
