"""`pdserve record`: the trace of a live cluster, and what a simulation makes of it."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from pdserve.commands.bench.load.traces import read_trace
from pdserve.commands.cli.main import main
from pdserve.commands.cli.running.record import Conversations
from pdserve.commands.cluster.supervisor import OWN_COMMAND
from pdserve.commands.simulation.simulate.config import SimulateConfig
from pdserve.commands.simulation.simulate.run import answer
from pdserve.measured.trace_lines import TraceLine
from pdserve.shared.errors import ConfigError
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client
from tests.cluster.fleet import Fleet
from tests.fakes.http import serving
from tests.waits import until

SECRET = "the client's own words"


async def test_a_recorded_conversation_is_a_trace(
    fleet: Fleet, client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "recorded.jsonl"
    recording = await asyncio.create_subprocess_exec(
        *OWN_COMMAND, "record", str(file), "--url", fleet.url, stdout=asyncio.subprocess.PIPE
    )
    await until(lambda: file.exists() and file.stat().st_size > 0)
    first = make_prompt(200, SECRET)
    await client.complete(first, 6)
    await client.complete(make_prompt(30), 2)
    await client.complete([*first, *make_prompt(80)], 3)
    await until(lambda: file.read_text().count("\n") == 1 + 3)  # the header, and what ended
    recording.send_signal(signal.SIGINT)
    said, _ = await recording.communicate()
    assert recording.returncode == 0
    assert b"3 requests written" in said
    assert SECRET not in file.read_text()
    turn, short, next_turn = read_trace(file, seed=0)
    assert [turn.num_prompt, short.num_prompt, next_turn.num_prompt] == [200, 30, 280]
    assert [turn.num_output, short.num_output, next_turn.num_output] == [6, 2, 3]
    assert len({*turn.blocks}) == 3
    assert next_turn.blocks[:3] == turn.blocks
    assert len({*next_turn.blocks}) == 4
    assert next_turn.follows == 0
    assert 0 < next_turn.think_s < 60
    assert short.blocks == ()
    simulated = SimulateConfig(trace=str(file), modes=["colocated"], scale=1.0, requests=3)
    (mode,) = answer(simulated).modes
    assert mode.rows[0].score.finished == 3
    assert mode.rows[0].cached_tokens >= 192


async def test_as_many_as_may_record_at_a_time(fleet: Fleet) -> None:
    async with aiohttp.ClientSession() as session:
        url = f"{fleet.url}/admin/record"
        recording = [await session.get(url) for _ in range(4)]
        assert [response.status for response in recording] == [200] * 4
        refused = await session.get(url)
        assert refused.status == 429
        assert "4 clients record already" in await refused.text()
        for response in [*recording, refused]:
            response.close()


def test_a_file_that_is_there_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kept.jsonl"
    file.write_text("kept")
    assert main(["record", str(file), "--url", "http://127.0.0.1:9"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert file.read_text() == "kept"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "no coordinator at http://127.0.0.1:9"),
        (["--for-s", "-1"], "--for-s -1: must be 0 (until Ctrl-C) or more"),
        (["--ca", "/nowhere"], "--ca /nowhere has no certificate of a CA"),
    ],
)
def test_what_cannot_be_recorded_leaves_no_file(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new.jsonl"
    assert main(["record", str(file), *words]) != 0
    assert said in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.long
async def test_what_is_no_coordinator_is_told(tmp_path: Path) -> None:
    async def other(request: web.Request) -> web.Response:
        return web.Response(body=b"data: {}\n\n", content_type="text/event-stream")

    async with serving(web.get("/admin/record", other)) as url:
        recording = await asyncio.create_subprocess_exec(
            *OWN_COMMAND,
            "record",
            str(tmp_path / "new"),
            "--url",
            url,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await recording.communicate()
        assert f"{url} does not speak as a coordinator does" in said.decode()


def line(number: int, at_s: float, tokens: int, *blocks: int) -> TraceLine:
    return TraceLine(
        id=number,
        timestamp=1e3 * at_s,
        input_length=tokens,
        output_length=5,
        hash_ids=list(blocks),
        took_s=1.0,
    )


def test_a_request_follows_the_longest_prompt_that_had_ended() -> None:
    conversations = Conversations()
    placed = [
        conversations.placed(told)
        for told in (
            line(0, 0.0, 70, 111),
            line(1, 2.0, 150, 111, 222),
            line(2, 2.5, 210, 111, 222, 333),  # the one with two blocks runs still
            line(3, 5.0, 300, 111, 222, 999, 888),
            line(4, 6.0, 150, 111, 222),  # the same again: nobody extends himself
        )
    ]
    assert [told.follows for told in placed] == [None, 0, 0, 1, 0]
    assert [told.think_s for told in placed] == [0.0, 1.0, 1.5, 2.0, 5.0]
    assert placed[3].hash_ids == [111, 222, 999, 888]


def test_lines_that_are_none_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    header = json.dumps({"format": "pdserve trace 1", "block_tokens": 64})
    for bad, said in (
        ('{"id": 1}', "line 2: Object missing required field `timestamp`"),
        ('{"id": 1, "timestamp": 0, "input_length": -1, "output_length": 1}', "-1 tokens"),
    ):
        file.write_text(f"{header}\n{bad}\n")
        with pytest.raises(ConfigError, match=said):
            read_trace(file, 0)
    file.write_text(header.replace("trace 1", "trace 9") + "\n")
    with pytest.raises(ConfigError, match="line 1: Invalid enum value 'pdserve trace 9'"):
        read_trace(file, 0)
