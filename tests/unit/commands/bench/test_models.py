"""`pdserve bench models` against a server that only pretends to have some."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web

from pdserve.commands.bench.checkpoints.shapes import SHAPES
from pdserve.commands.bench.models.config import ModelsBenchConfig
from pdserve.commands.bench.models.run import by_zipf, measured, write_models
from pdserve.settings.models import read_models
from pdserve.shared.errors import ConfigError
from tests.fakes.http import serving

TOKEN = 'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
END = 'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'


class Server:
    """Answers, but for one model."""

    def __init__(self, broken: str = "") -> None:
        self.asked: list[str] = []
        self.prompts: set[tuple[int, ...]] = set()
        self._broken = broken

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body["model"])
        self.prompts.add(tuple(body["prompt"]))
        if body["model"] == self._broken and len(self.asked) > 4:
            return web.Response(status=503, text='{"error": {"message": "no memory"}}')
        return web.Response(text=TOKEN * body["max_tokens"] + END)


def config_of(**fields: object) -> ModelsBenchConfig:
    few = {"models": 4, "wakes": 6, "mix_s": 0.5, "pause_s": 0.001, "output_tokens": 2}
    return ModelsBenchConfig(**few | fields)  # type: ignore[arg-type]


async def test_models_are_asked_in_turn_and_then_by_zipf() -> None:
    server, config = Server(), config_of()
    async with serving(web.post("/v1/completions", server.complete)) as url:
        row = await measured("one", url, config)
    assert server.asked[:10] == ["m0", "m1", "m2", "m3", "m0", "m1", "m2", "m3", "m0", "m1"]
    mix = server.asked[10:]
    assert Counter(mix) == Counter(one.model for one in by_zipf(config)[: len(mix)])
    assert len(server.prompts) == len(server.asked), "none finds the KV of another"
    assert (row.failed, row.wake_ttft_ms.count) == (0, 6)
    assert len(mix) - config.streams <= row.sent - 6 <= len(mix)
    assert row.sent == 6 or row.mix_tokens_per_s > 0  # a machine may stand still for half a second


async def test_a_server_that_answers_no_more_does_not_keep_it_waiting() -> None:
    server, over = Server(), asyncio.Event()

    async def complete(request: web.Request) -> web.StreamResponse:
        if len(server.asked) >= 4:  # each was there once
            await over.wait()
        return await server.complete(request)

    config = config_of(request_s=0.001)
    async with serving(web.post("/v1/completions", complete)) as url, asyncio.timeout(60.0):
        row = await measured("one", url, config)
        over.set()
    assert row.errors == {"no answer in time": config.wakes + config.streams}
    assert row.mix_tokens_per_s == 0


async def test_what_fails_is_counted() -> None:
    server, config = Server(broken="m1"), config_of()
    async with serving(web.post("/v1/completions", server.complete)) as url:
        row = await measured("one", url, config)
    num_asked = server.asked.count("m1") - 1  # the first time it answers
    assert num_asked - config.streams <= row.failed <= num_asked
    assert row.errors == {"503 no memory": row.failed}


def test_shares_are_zipf_s() -> None:
    requests = by_zipf(config_of(mix_s=100.0))[:5000]
    asked = Counter(one.model for one in requests)
    for rank in range(1, 5):
        assert asked[f"m{rank - 1}"] == pytest.approx(2400 / rank, rel=0.1)


def test_the_models_that_are_written_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SHAPES["demo-14m"] | {"hidden_size": 64, "intermediate_size": 64}
    monkeypatch.setitem(SHAPES, "demo-14m", small | {"num_hidden_layers": 1})
    write_models(config_of(models=3, shape="demo-14m"), tmp_path, has_gguf=True)
    file = read_models(str(tmp_path / "models.toml"))
    assert file.shared.at_once == 2
    for form in "m{}/model.safetensors", "gguf/m{}.gguf":
        files = [(tmp_path / form.format(number)).read_bytes() for number in range(3)]
        assert len({*files}) == 3
    assert [*file.models] == ["m0", "m1", "m2"]


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="none would sleep"):
        config_of(awake=4)
    with pytest.raises(ConfigError, match="http://a: give a command"):
        _ = config_of(against=["x=http://a"]).backends
    with pytest.raises(ConfigError, match="for one of pdserve, llama"):
        _ = config_of(against=["vllm=/venv"]).backends
