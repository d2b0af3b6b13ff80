"""What a JSON text would be made into is counted as it is made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve import _native

NASTY_TEXTS = st.text(alphabet='\\"[]{},: aé😀\n', max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | NASTY_TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NASTY_TEXTS, inner, max_size=4),
    max_leaves=20,
)


def shape_of(value: Any) -> tuple[int, int, int, int]:
    """The same from the values themselves."""
    if not isinstance(value, list | dict):
        return 0, 0, 0, 0
    inner = [shape_of(one) for one in (value.values() if isinstance(value, dict) else value)]
    members = len(value) if isinstance(value, dict) else 0
    return (
        1 + sum(shape[0] for shape in inner),
        members + sum(shape[1] for shape in inner),
        max(0, len(value) - 1) + sum(shape[2] for shape in inner),
        1 + max((shape[3] for shape in inner), default=0),
    )


@given(value=VALUES, is_ascii=st.booleans())
def test_shapes_of_valid_texts(value: Any, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert _native.json_shape(text) == shape_of(value)


@pytest.mark.parametrize("text", [b"", b'"', b'"\\', b'"\\"', b'"[,{:', b"\\", b"]}", b'\0"\0'])
def test_texts_that_are_none(text: bytes) -> None:
    assert _native.json_shape(text) == (0, 0, 0, 0)


def test_where_strings_end() -> None:
    assert _native.json_shape(rb'["a\\","b\\\"[",{"c":"\\\\"}]') == (2, 1, 2, 2)
