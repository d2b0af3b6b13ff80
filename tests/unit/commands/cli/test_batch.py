"""`pdserve batch run`: a file goes out, and its answers come back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pdserve.commands.cli.main import main
from pdserve.commands.cli.running import batch
from pdserve.shared.errors import ConfigError
from tests.unit.coordinator.api.harness import served
from tests.unit.coordinator.jobs.played import cluster
from tests.unit.coordinator.jobs.test_batches import line


async def test_a_file_is_answered_and_faults_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line(1), line(2, model="no"), line(3)]
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text("\n".join(map(json.dumps, lines)))
    bad.write_text(f"{json.dumps(line(1))}\n{{")
    async with served(cluster()) as api:

        def run(*argv: str) -> int:
            return main(["batch", "run", *argv, "--url", api.server.url])

        assert await asyncio.to_thread(run, str(good)) == 1, "one line has failed"
        answers = (tmp_path / "good.answers.jsonl").read_text().splitlines()
        assert [json.loads(one)["custom_id"] for one in answers] == ["line-1", "line-3"]
        assert "line-2" in (tmp_path / "good.answers.errors.jsonl").read_text()
        assert "completed: 2 of 3 answered" in capsys.readouterr().out
        assert await asyncio.to_thread(run, str(bad)) == 1
        assert "line 2: the line is not valid JSON" in capsys.readouterr().out
        with pytest.raises(ConfigError, match="there already"):
            batch.run(api.server.url, good, None)
        assert await asyncio.to_thread(run, str(good), "--output", str(tmp_path / "b")) == 1


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for text in ("", "[]", '{"a": 1}'):
        (tmp_path / "x").write_text(text)
        with pytest.raises(ConfigError, match="does not begin with a request"):
            batch.run("http://127.0.0.1:1", tmp_path / "x", None)
