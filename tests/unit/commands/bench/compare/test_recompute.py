"""`pdserve bench compare --from`: the same report, from the raw requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
from aiohttp import web

from pdserve.commands.bench.compare import interference
from pdserve.commands.bench.compare.clusters import Clusters
from pdserve.commands.bench.compare.runner import Candidate, ModeServer
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.cli.main import main
from tests.fakes.server import Answer, Body, FakeServer, answer_all

pytestmark = pytest.mark.long  # test_compare_run.py has it by default

FLAGS = (
    "--scenarios long-prompts --rates 400,500 --quick "
    "--duration-s 0.1 --ttft-s 9 --tpot-s 9 "
    "--set idle_requests=1 --set length_scale=0.05 --set seed=7"
)


def refusing_some(every: int) -> Answer:
    numbers = count(1)

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        if "-rate-" in body["cache_salt"] and next(numbers) % every == 0:
            return web.json_response({"error": {"message": "no"}}, status=429)
        return await answer_all(request, body)

    return answer


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a comparison in which a mode has failed in the middle."""
    folder = tmp_path_factory.mktemp("comparison")
    every = {"disaggregated": 11, "colocated": 4, "adaptive": 1000}

    @asynccontextmanager
    async def launch(
        self: Clusters, candidate: Candidate, promise: Promise | None
    ) -> AsyncIterator[ModeServer]:
        server = FakeServer(refusing_some(every[candidate.mode]))
        server.settles = candidate.mode != "adaptive"
        async with server.running() as running:
            yield running

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clusters, "launch", launch)
        for name, value in (("FIRST_S", 0.01), ("EVERY_S", 0.01), ("STREAM_TOKENS", 30)):
            patch.setattr(interference, name, value)
        assert main(["bench", "compare", f"--out={folder}", *FLAGS.split()]) == 1
    return folder


def test_all_that_was_made_is_made_again(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "compare", f"--from={measured}", f"--out={tmp_path}"]) == 1
    said = capsys.readouterr().out
    for text in ("A/A", "tuned at", "disturbed ITL p99", "adaptive is missing: a request hangs"):
        assert text in said
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in measured.iterdir()} - {"requests.jsonl", "processes.log"}
    assert "report.json" in names
    for name in names:
        assert (tmp_path / name).read_bytes() == (measured / name).read_bytes(), name


def test_every_figure_comes_from_the_requests(measured: Path, tmp_path: Path) -> None:
    """What the report says is not believed: only that these modes were measured, and how."""
    original = json.loads((measured / "report.json").read_text())
    forged = json.loads((measured / "report.json").read_text())
    for mode in forged["modes"]:
        mode |= {"goodput": 99.0, "goodput_interval": [98.0, 100.0], "goodput_is": "crossing"}
        mode["unloaded"]["median_tpot_s"] = 0.001
        for row in mode["rows"]:
            row["score"]["attainment"] = 1.0
        mode["rows"] = mode["rows"][:1]
    for scenario in forged["scenarios"]:
        scenario |= {"verdicts": [], "noise": None, "rates": [1.0], "mean_prompt_tokens": 1.0}
    (tmp_path / "report.json").write_text(json.dumps(forged))
    lines = (measured / "requests.jsonl").read_bytes()
    others = lines.replace(b'"scenario":"long-prompts"', b'"scenario":"another"')
    assert others != lines
    cut_off = b'{"what": "rate", "sce'  # it was killed
    (tmp_path / "requests.jsonl").write_bytes(others + lines + cut_off)
    again = tmp_path / "again"
    assert main(["bench", "compare", f"--from={tmp_path}", f"--out={again}"]) == 1
    assert json.loads((again / "report.json").read_text()) == original


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda folder: (folder / "report.json").unlink(), "cannot read the results"),
        (lambda folder: (folder / "report.json").write_text("{}"), "no results of ours"),
        (lambda folder: (folder / "requests.jsonl").write_text(""), "lacks runs of"),
    ],
)
def test_what_are_no_results_is_told(
    measured: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], object],
    complaint: str,
) -> None:
    for name in ("report.json", "requests.jsonl"):
        (tmp_path / name).write_bytes((measured / name).read_bytes())
    spoil(tmp_path)
    assert main(["bench", "compare", f"--from={tmp_path}", f"--out={tmp_path / 'new'}"]) == 2
    assert complaint in capsys.readouterr().err


def test_results_are_not_written_over_themselves(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "compare", f"--from={measured}", f"--out={measured}"]) == 2
    assert "has the results of another comparison" in capsys.readouterr().err
