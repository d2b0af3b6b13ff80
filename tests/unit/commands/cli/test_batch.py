"""`pdserve batch run`: a file goes out, and its answers come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.jobs.routes import open_jobs
from coordinator.jobs.storage.batches import Batches
from coordinator.jobs.storage.files import Files
from pdserve.commands.cli.main import main
from pdserve.commands.cli.running import batch
from pdserve.shared.errors import ClusterError, ConfigError, Overloaded
from pdserve.shared.process.exit_codes import FORCED, OK, USERS_FAULT
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


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_command_that_was_interrupted_is_given_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, answers = tmp_path / "x.jsonl", tmp_path / "x.answers.jsonl"
    file.write_text(json.dumps(line(1)))
    database = open_jobs(None)

    async def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    async with served(cluster(), jobs=database) as api:

        def run() -> int:
            return main(["batch", "run", str(file), "--url", api.server.url])

        with monkeypatch.context() as patched:
            patched.setattr(batch, "_followed", interrupted)
            assert await asyncio.to_thread(run) == FORCED
        (begun,) = await Batches(database).page("", "batch", behind=None, limit=9)
        assert f"{begun.id} goes on; the same command follows it" in capsys.readouterr().err
        was = file.read_text()
        file.write_text(json.dumps(line(2)))
        assert await asyncio.to_thread(run) == USERS_FAULT
        assert f"not as it was when {begun.id} began" in capsys.readouterr().err
        file.write_text(was)
        assert await asyncio.to_thread(run) == OK
        assert begun.id in capsys.readouterr().out
        assert json.loads(answers.read_text())["custom_id"] == "line-1"
        assert len(await Batches(database).page("", "batch", behind=None, limit=9)) == 1
        assert names_in(tmp_path) == [answers.name, file.name]
        answers.unlink()
        (tmp_path / "x.answers.batch.json").write_text('{"batch_id": "no", "sha256": "?"}')
        assert await asyncio.to_thread(run) == USERS_FAULT


async def test_a_coordinator_may_be_busy_and_answers_may_break_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(json.dumps(line(n)) for n in range(3)))
    busy, faults, read = [1, 1], [1, 1], Files.read
    check = Files.check_room

    async def checked(files: Files, owner: str, num_bytes: int) -> tuple[int, int]:
        if busy:
            busy.pop()
            raise Overloaded("too many")
        return await check(files, owner, num_bytes)

    async def broken(files: Files, owner: str, file_id: str) -> AsyncIterator[bytes]:
        async for chunk in read(files, owner, file_id):
            if faults and b"response" in chunk:
                faults.pop()
                yield chunk[:9]
                raise OSError("the disk is gone")
            yield chunk

    monkeypatch.setattr(Files, "check_room", checked)
    monkeypatch.setattr(Files, "read", broken)
    monkeypatch.setattr(batch, "_LOOK_S", 0.01)
    async with served(cluster(), retry_after_s=0) as api:
        argv = ["batch", "run", str(file), "--url", api.server.url]
        assert await asyncio.to_thread(main, argv) == OK
    assert len((tmp_path / "x.answers.jsonl").read_text().splitlines()) == 3
    assert not busy
    assert not faults
    assert len(names_in(tmp_path)) == 2, "no part of the answers is left"


def test_nobody_at_a_url_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "x").write_text(json.dumps(line(1)))
    for url in ("http://127.0.0.1:1", "localhost", "http://"):
        with pytest.raises(ClusterError, match="no coordinator at"):
            batch.run(url, tmp_path / "x", None)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for text in ("", "[]", '{"a": 1}'):
        (tmp_path / "x").write_text(text)
        with pytest.raises(ConfigError, match="does not begin with a request"):
            batch.run("http://127.0.0.1:1", tmp_path / "x", None)
