"""What is measured: TTFT, ITL, TPOT and outcomes."""

from __future__ import annotations

import pytest

from pdserve.protocol import FinishReason
from pdserve.shared.errors import Overloaded
from tests.fakes.generator import EOS, FakeGenerator, Pause, Step, Tokens, tiny_tokenizer
from tests.unit.coordinator.api.harness import served

STEP_S = 0.05


def tokens(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=False)


@pytest.mark.parametrize("stream", [True, False])
async def test_latencies_of_a_request(stream: bool) -> None:
    steps: list[Step] = [
        Pause(STEP_S),
        Tokens(tokens("a")),
        Pause(STEP_S),
        Tokens(tokens(" ") * 2),  # two at once
        Pause(STEP_S),
        Tokens([EOS], FinishReason.STOP, EOS),
    ]
    async with served(FakeGenerator(lambda _: steps)) as api, api.chat(stream=stream) as response:
        await response.read()
    seen = api.observer
    (summary,) = seen.finished
    assert summary.endpoint == "/v1/chat/completions"
    assert summary.is_streaming == stream
    assert (summary.status, summary.error_code, summary.finish_reason) == (200, None, "stop")
    assert summary.num_completion_tokens == 4
    assert summary.num_cached_tokens == 3
    assert summary.num_prompt_tokens == len(api.generator.last.request.prompt.token_ids)
    assert summary.request_id == response.headers["x-request-id"]
    assert seen.ttft_s == [summary.ttft_s]
    assert summary.ttft_s is not None
    assert summary.tpot_s is not None
    assert STEP_S <= summary.ttft_s < summary.e2e_s
    assert summary.tpot_s == pytest.approx((summary.e2e_s - summary.ttft_s) / 3)
    assert len(seen.itl_s) == 3
    assert sum(seen.itl_s) == pytest.approx(summary.e2e_s - summary.ttft_s)
    assert sorted(seen.itl_s)[0] == 0.0
    assert sorted(seen.itl_s)[1] >= STEP_S * 0.9


async def test_half_a_character_is_not_a_first_token() -> None:
    fox = tokens("🦊")
    steps: list[Step] = [
        Tokens(fox[:1]),
        Pause(STEP_S),
        Tokens(fox[1:]),
        Tokens([EOS], FinishReason.STOP, EOS),
    ]
    async with served(FakeGenerator(lambda _: steps)) as api, api.chat() as response:
        await response.read()
    assert api.observer.ttft_s[0] >= STEP_S * 0.9


async def test_an_answer_without_text_has_no_ttft_and_no_tpot() -> None:
    steps: list[Step] = [Tokens([EOS], FinishReason.STOP, EOS)]
    async with served(FakeGenerator(lambda _: steps)) as api, api.chat() as response:
        await response.read()
    assert api.observer.ttft_s == []
    assert api.observer.finished[0].ttft_s is None
    assert api.observer.finished[0].tpot_s is None


async def test_refusals_are_counted_and_other_endpoints_are_not() -> None:
    async with served(FakeGenerator(start_error=Overloaded("full"))) as api:
        for path in ("/health", "/v1/models", "/nothing"):
            async with api.client.get(path) as response:
                await response.read()
        async with api.complete() as response:
            assert response.status == 429
        async with api.chat(temperature="x") as response:
            assert response.status == 400
    outcomes = [(s.endpoint, s.status, s.error_code) for s in api.observer.finished]
    assert outcomes == [
        ("/v1/completions", 429, "overloaded"),
        ("/v1/chat/completions", 400, "invalid_request"),
    ]


async def test_several_choices_have_no_tpot() -> None:
    async with served() as api, api.complete(prompt=["a", "b"]) as response:
        await response.read()
    (summary,) = api.observer.finished
    assert summary.tpot_s is None
    assert summary.num_completion_tokens == 2 * (len(tokens("Hello world")) + 1)
