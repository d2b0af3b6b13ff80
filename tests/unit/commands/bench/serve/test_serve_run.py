"""`pdserve bench serve`: what it can be told, and what it prints."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from pdserve.commands.bench.load.client_run import Run
from pdserve.commands.bench.serve import run as bench_serve
from pdserve.commands.bench.serve.config import Load, ServeBenchConfig
from pdserve.commands.bench.serve.report import ServeReport, serve_row
from pdserve.commands.cli.main import main
from pdserve.shared.errors import ClusterError, ConfigError
from pdserve.shared.process.exit_codes import FAILED, FORCED
from tests.fakes.server import Answer, Body, FakeServer, answer_all, stream


def loads(**changes: object) -> list[str]:
    return [str(load) for load in ServeBenchConfig(**changes).plan.loads]  # type: ignore[arg-type]


def test_a_load_is_a_number_of_streams_or_a_rate() -> None:
    assert loads() == ["1 at a time", "4 at a time", "16 at a time"]
    assert loads(concurrency=[2]) == ["2 at a time"]
    assert loads(rate=[0.5, 2.0]) == ["0.5/s", "2/s"]


def test_a_comparison_has_several_rounds() -> None:
    assert ServeBenchConfig().plan.rounds == 1
    assert ServeBenchConfig(url=["http://a", "http://b"]).plan.rounds == 3
    assert ServeBenchConfig(url=["http://a", "http://b"], rounds=5).plan.rounds == 5


def test_a_load_that_is_named_twice_is_the_users_fault() -> None:
    with pytest.raises(ConfigError, match="not name a load twice"):
        loads(concurrency=[4, 4])


def test_nobody_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 1
    assert "does not list its models" in capsys.readouterr().err


async def run_against(*answers: Answer, as_json: bool) -> int:
    async with FakeServer(answers[0]).running() as first, FakeServer(answers[-1]).running() as last:
        urls = [server.url for server in (first, last)][: len(answers)]
        arguments = ["--url", ",".join(urls), "--concurrency=2", "--requests=4", "--rounds=1"]
        arguments += ["--prompt-tokens=4", "--output-tokens=3", *(["--json"] if as_json else [])]
        return await asyncio.to_thread(main, ["bench", "serve", *arguments])


async def test_json_has_rows_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run_against(answer_all, answer_all, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["finished"] for row in report["rows"]] == [4, 4]
    assert set(report["rows"][0]["ttft_ms"]) == {"count", "p50", "p90", "p99"}
    assert len(report["ratios"]) == 1
    assert report["setup"]["config"]["prompt_tokens"] == 4


@pytest.mark.parametrize(
    ("end", "exit_code", "said"),
    [
        (KeyboardInterrupt(), FORCED, "interrupted"),
        (ClusterError("b is gone"), FAILED, "b is gone; "),
    ],
)
def test_what_was_done_before_it_ended_is_printed(
    end: BaseException,
    exit_code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def interrupted(config: ServeBenchConfig, report: ServeReport) -> None:
        done = Run([], [], elapsed_s=1.0, cpu_s=0.0)
        report.rows.append(serve_row("http://it", "m", Load(concurrency=1), [done]))
        raise end

    assert bench_serve.run_with(ServeBenchConfig(json=True), {}, interrupted) == exit_code
    captured = capsys.readouterr()
    assert [row["server"] for row in json.loads(captured.out)["rows"]] == ["http://it"]
    assert said in captured.err


async def test_people_see_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        if body["max_tokens"] == 3:
            return await stream(request)
        return await answer_all(request, body)

    assert await run_against(answer, as_json=False) == 1
    out = capsys.readouterr().out
    assert "2 at a time" in out
    assert "4 times: the stream broke off: without a word" in out


async def test_the_key_of_the_environment_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "secret")
    shown: set[str | None] = set()

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        shown.add(request.headers.get("Authorization"))
        return await answer_all(request, body)

    assert await run_against(answer, as_json=True) == 0
    assert shown == {"Bearer secret"}
