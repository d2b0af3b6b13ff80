"""When a request's next token is due."""

from __future__ import annotations

from math import inf

import pytest

from pdserve.engine.request import Request, next_due_s, shown_s
from pdserve.lifecycle import Targets
from tests.requests import make_request


def handed_off(held_until_s: float, room_s: float | None) -> Request:
    """Prefilled elsewhere until 10; its place here was there at `room_s`, None: not yet."""
    request = make_request(
        3,
        output_token_ids=[1, 1],
        targets=Targets(held_until_s=held_until_s, tpot_s=0.5),
    )
    request.lifecycle.prefill_end_s = 10.0
    if room_s is not None:
        request.lifecycle.room_wait = (5.0, room_s)
    return request


@pytest.mark.parametrize(
    ("held_until_s", "room_s", "now_s", "expected_s"),
    [
        pytest.param(-inf, None, 30.0, 10.0, id="waits, and cannot be held back"),
        pytest.param(20.0, None, 12.0, 12.0, id="waits, held back"),
        pytest.param(20.0, None, 30.0, 20.0, id="waits, held back for as long as it could be"),
        pytest.param(20.0, 12.0, 30.0, 12.0, id="has waited"),
        pytest.param(20.0, 25.0, 30.0, 20.0, id="has waited for longer"),
        pytest.param(20.0, 7.0, 30.0, 10.0, id="had its place before it was prefilled"),
        pytest.param(9.0, 12.0, 30.0, 10.0, id="was prefilled too late"),
    ],
)
def test_when_token_one_was_shown(
    held_until_s: float, room_s: float | None, now_s: float, expected_s: float
) -> None:
    request = handed_off(held_until_s, room_s)
    assert shown_s(request, now_s) == expected_s


def test_tokens_are_due_from_then_on() -> None:
    assert next_due_s(handed_off(20.0, 12.0)) == 12.0 + 2 * 0.5


def test_what_was_sampled_here_was_shown_then() -> None:
    request = handed_off(20.0, None)
    request.lifecycle.first_token_s = 11.0
    assert shown_s(request, 30.0) == 11.0
