import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from pdserve.commands.cli.chat import Answer, ask
from pdserve.shared.errors import ClusterError, NodeLost, PdserveError
from tests.fakes.http import serving


def chunk(content=None, finish_reason=None) -> str:
    delta = {} if content is None else {"content": content}
    return json.dumps({"choices": [{"delta": delta, "finish_reason": finish_reason}]})


USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}})
WHOLE = [chunk(""), chunk("Hel"), chunk("lo"), chunk(None, "stop"), USAGE, "[DONE]"]


@asynccontextmanager
async def answering(events: list[str], status: int = 200) -> AsyncIterator[tuple[str, list]]:
    bodies = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.Response(
            status=status,
            headers={"x-pdserve-prefill-node": "prefill-0", "x-pdserve-decode-node": "decode-0"},
            text="".join(f"data: {event}\n\n" for event in events),
        )

    paths = ("/v1/chat/completions", "/v1/completions")
    async with serving(*(web.post(path, answer) for path in paths)) as url:
        yield url, bodies


async def test_an_answer_arrives_piece_by_piece_and_is_timed():
    pieces = []
    async with answering(WHOLE) as (url, bodies):
        answer = await ask(url, "m", "Hi", 7, pieces.append)
    assert pieces == ["Hel", "lo"]
    assert (answer.text, answer.finish_reason) == ("Hello", "stop")
    assert (answer.prompt_tokens, answer.output_tokens) == (4, 2)
    assert (answer.prefill_node, answer.decode_node) == ("prefill-0", "decode-0")
    assert 0 < answer.ttft_s <= answer.e2e_s
    (body,) = bodies
    assert body["temperature"] == 0
    assert (body["model"], body["max_tokens"], body["stream"]) == ("m", 7, True)


async def test_a_model_without_chat_template_goes_on_with_the_prompt():
    choices = [{"text": "lo"}, {"text": " you", "finish_reason": "length"}]
    events = [json.dumps({"choices": [choice]}) for choice in choices]
    async with answering([*events, USAGE, "[DONE]"]) as (url, bodies):
        answer = await ask(url, "m", "Hel", 7, lambda text: None, is_chat=False)
    assert (answer.text, answer.finish_reason) == ("lo you", "length")
    assert bodies[0]["prompt"] == "Hel"
    assert "messages" not in bodies[0]


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        (WHOLE[:-1], "broke off"),
        ([*WHOLE[:3], "[DONE]"], "broke off"),
        ([chunk(None, "stop"), USAGE, "[DONE]"], "empty"),
        (["{", "[DONE]"], "not a chunk of a completion"),
    ],
)
async def test_an_incomplete_answer_is_an_error(events, complaint):
    async with answering(events) as (url, _):
        with pytest.raises(ClusterError, match=complaint):
            await ask(url, "m", "Hi", 7, lambda text: None)


async def test_an_error_in_the_stream_is_the_servers_own():
    error = json.dumps({"error": {"message": "decode-0 is gone", "code": "node_lost"}})
    async with answering([*WHOLE[:2], error]) as (url, _):
        with pytest.raises(NodeLost, match="decode-0 is gone"):
            await ask(url, "m", "Hi", 7, lambda text: None)


async def test_a_refusal_is_passed_on():
    async with answering(["too busy"], status=429) as (url, _):
        with pytest.raises(PdserveError, match=r"refused with 429: .*too busy"):
            await ask(url, "m", "Hi", 7, lambda text: None)


async def test_a_connection_that_fails_is_a_cluster_error():
    with pytest.raises(ClusterError, match="broke"):
        await ask("http://127.0.0.1:1", "m", "Hi", 7, lambda text: None)


def test_tpot_is_over_all_tokens_but_the_first():
    def answer(output_tokens: int) -> Answer:
        return Answer("", "stop", 1, output_tokens, 0.5, 2.5, "", "")

    assert answer(5).tpot_s == pytest.approx(0.5)
    assert answer(1).tpot_s is None
