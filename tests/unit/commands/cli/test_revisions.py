"""`pdserve revisions`: what it sends, and what it shows."""

from __future__ import annotations

import pytest

from pdserve.commands.cli.running import revisions
from pdserve.settings.values import parse_shares


def test_shares_are_read() -> None:
    assert parse_shares(["4f0c=0.9", "a=b=1"]) == {"4f0c": 0.9, "a=b": 1.0}


@pytest.mark.parametrize("text", ["4f0c", "=1", "4f0c=", "4f0c=half", "a=-1", "a=nan", "a=inf"])
def test_what_is_no_share_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="write REVISION=SHARE"):
        parse_shares([text])


def test_the_table() -> None:
    lines = revisions.table({"4f": 0.9, "d8": 0.1, "77": 0}, {"4f0c": 3, "d81a+int8": 1, "x": 1})
    assert lines == [
        "revision   nodes  share",
        "4f0c           3    0.9",
        "d81a+int8      1    0.1",
        "x              1   none",
        "77             0      0",
    ]
    assert revisions.table({}, {"4f0c": 3})[1] == "4f0c          3    all"
