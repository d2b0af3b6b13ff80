from __future__ import annotations

import pytest

from pdserve.engine.request import finish
from pdserve.protocol import FinishReason
from tests.requests import make_request

EOS = frozenset({7, 8})


@pytest.mark.parametrize(
    ("output", "sampling", "reason", "stop_token_id"),
    [
        ([1], {}, None, None),
        ([1, 7], {}, FinishReason.STOP, 7),
        ([1, 8], {}, FinishReason.STOP, 8),
        ([7, 1], {}, None, None),
        ([1, 7], {"ignore_eos": True}, None, None),
        ([1, 3], {"stop_token_ids": [3]}, FinishReason.STOP, 3),
        ([1, 3], {"stop_token_ids": [3], "ignore_eos": True}, FinishReason.STOP, 3),
        ([1, 7], {"stop_token_ids": [7], "ignore_eos": True}, FinishReason.STOP, 7),
        ([7], {"min_tokens": 2}, None, None),
        ([1, 7], {"min_tokens": 2}, FinishReason.STOP, 7),
        ([1, 2, 3], {"max_tokens": 3}, FinishReason.LENGTH, None),
        ([1, 2, 7], {"max_tokens": 3}, FinishReason.STOP, 7),
        ([1, 2, 7], {"max_tokens": 3, "ignore_eos": True}, FinishReason.LENGTH, None),
        ([7], {"max_tokens": 1, "min_tokens": 1}, FinishReason.STOP, 7),
    ],
)
def test_what_ends_a_request_and_why(
    output: list[int],
    sampling: dict[str, object],
    reason: FinishReason | None,
    stop_token_id: int | None,
) -> None:
    request = make_request([5], output, **sampling)
    finish(request, EOS)
    assert request.finish_reason == reason
    assert request.stop_token_id == stop_token_id
