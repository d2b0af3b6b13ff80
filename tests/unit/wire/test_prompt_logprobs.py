"""A prompt's log-probabilities travel in columns: reading many of them makes few objects."""

from __future__ import annotations

import pytest

from pdserve.protocol import PromptLogprobs, TokenBatch, TokenEvent, TokenLogprobs
from pdserve.shared.errors import MalformedMessage
from pdserve.wire.envelopes import FROM_NODE

FOUND = [
    TokenLogprobs(chosen=-0.5 * n, rank=n, top_ids=[n, n + 1], top_logprobs=[-1.0, -2.0 - n])
    for n in range(1, 8)
]


def batch(logprobs: PromptLogprobs) -> TokenBatch:
    return TokenBatch(
        events=[TokenEvent(request_id="a", index=0, token_ids=[1], prompt_logprobs=logprobs)]
    )


@pytest.mark.parametrize("found", [FOUND, [TokenLogprobs(chosen=-1.0, rank=1)] * 3, []])
def test_columns_are_what_they_were_made_of(found: list[TokenLogprobs]) -> None:
    sent = batch(PromptLogprobs.of(found))
    message = FROM_NODE.unwrap(FROM_NODE.wrap(sent))
    assert message == sent
    assert isinstance(message, TokenBatch)
    (event,) = message.each()
    assert event.prompt_logprobs is not None
    assert len(event.prompt_logprobs) == len(found)
    assert event.prompt_logprobs.within(0, 100) == found
    assert event.prompt_logprobs.within(2, 4) == found[2:4]
    assert event.prompt_logprobs.within(100, 200) == []


@pytest.mark.parametrize(
    "columns",
    [
        {"chosen": [-1.0]},
        {"chosen": [-1.0], "ranks": [1, 2]},
        {"chosen": [-1.0], "ranks": [1], "top_ids": [3]},
        {"chosen": [-1.0] * 2, "ranks": [1] * 2, "top_ids": [3] * 3, "top_logprobs": [-1.0] * 3},
        {"top_ids": [3], "top_logprobs": [-1.0]},
    ],
)
def test_columns_that_do_not_fit_together_are_refused(columns: dict[str, list[float]]) -> None:
    malformed = batch(PromptLogprobs(**columns))  # type: ignore[arg-type]
    with pytest.raises(MalformedMessage, match="PromptLogprobs"):
        list(malformed.each())
