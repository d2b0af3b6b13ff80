"""Files and batches: what is uploaded, validated, answered, cancelled, and gone on with."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from coordinator.api.read.json_text import MAX_CONTAINERS
from coordinator.jobs import lines as limits
from coordinator.jobs.output import add_used
from coordinator.jobs.routes import open_jobs
from coordinator.jobs.runner import BatchRunner
from coordinator.jobs.storage import tables
from coordinator.jobs.storage.batches import AnsweredLine, Batches, LineState, TokensUsed
from coordinator.jobs.storage.database import Row, SqliteDatabase, Step
from coordinator.jobs.storage.files import CHUNK_BYTES, Files
from coordinator.tenants import Tenants
from coordinator.tenants.key_book import LOOK_S, KeyBook
from pdserve.protocol import FinishReason
from pdserve.settings.access import hash_key
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import InvalidRequest, NodeLost, Overloaded, StoreUnavailable
from tests.fakes.generator import EOS, MODEL, Pause, Tokens, says
from tests.fakes.generator import tiny_tokenizer as tokenizer
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import Harness, served
from tests.unit.coordinator.api.protocols import NAMES, SPEECHES, Speech
from tests.unit.coordinator.jobs.played import cluster
from tests.waits import until

DEADLINE_S = 20.0
CHAT = SPEECHES[[speech.path for speech in SPEECHES].index("/v1/chat/completions")]


def line(number: int, speech: Speech = CHAT, **body: Any) -> dict[str, Any]:
    given = {"method": "POST", "url": speech.path, "body": speech.asked(**body)}
    return {"custom_id": f"line-{number}", **given}


async def upload(api: Harness, given: list[Any], **fields: str) -> dict[str, Any]:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in given)
    form = aiohttp.FormData({"purpose": "batch", **fields})
    form.add_field("file", io.BytesIO(text.encode()), filename="lines.jsonl")
    async with api.client.post("/v1/files", data=form) as response:
        assert response.status == 200, await response.text()
        return dict(await response.json())


async def create(api: Harness, file_id: str, endpoint: str = CHAT.path, **more: Any) -> Any:
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **more}
    async with api.client.post("/v1/batches", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def got(api: Harness, path: str, status: int = 200) -> Any:
    async with api.client.get(path) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def ended(api: Harness, batch: Any, *statuses: str) -> Any:
    """The batch once it has one of the statuses: by default, has ended."""
    wanted = statuses or ("completed", "failed", "cancelled", "expired")
    async with asyncio.timeout(DEADLINE_S):
        while True:
            batch = await got(api, f"/v1/batches/{batch['id']}")
            if batch["status"] in wanted:
                return batch
            await asyncio.sleep(0.01)


async def content(api: Harness, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    async with api.client.get(f"/v1/files/{file_id}/content") as response:
        assert response.status == 200
        return [json.loads(text) for text in (await response.text()).splitlines()]


async def run(api: Harness, given: list[Any], endpoint: str = CHAT.path) -> Any:
    return await ended(api, await create(api, (await upload(api, given))["id"], endpoint))


@pytest.mark.parametrize("speech", SPEECHES, ids=NAMES)
async def test_every_line_is_answered_as_its_endpoint_would(speech: Speech) -> None:
    given = [line(n, speech) for n in range(12)]
    given[5]["body"]["model"] = "no"
    async with served(cluster(says("Hello"))) as api:
        batch = await run(api, given, speech.path)
        assert (batch["status"], batch["errors"]) == ("completed", None)
        assert batch["request_counts"] == {"total": 12, "completed": 11, "failed": 1}
        assert batch["model"] is None, "they name two"
        output = await content(api, batch["output_file_id"])
        (error,) = await content(api, batch["error_file_id"])
        seeds = [g.request.sampling.seed for g in api.generator.generations]
        requests = [g.request for g in api.generator.generations]
    assert [one["custom_id"] for one in output] == [f"line-{n}" for n in range(12) if n != 5]
    assert {speech.text(one["response"]["body"]) for one in output} == {"Hello"}
    assert {one["response"]["status_code"] for one in output} == {200}
    assert (error["custom_id"], error["response"]["status_code"]) == ("line-5", 404)
    assert speech.is_error(error["response"]["body"])
    usage, ids = batch["usage"], [request.prompt.num_tokens for request in requests]
    assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (
        sum(ids),
        3 * 11,
    )
    num_tokens = 1 + len(tokenizer().encode("Hello", add_special_tokens=False))
    assert usage["output_tokens"] == 11 * num_tokens
    assert len(set(seeds)) == 11
    assert {request.slo.name for request in requests} == {"batch"}
    assert all(request.is_claimable for request in requests)


async def test_embeddings_are_batched_too() -> None:
    given = [
        {
            "custom_id": f"e{n}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": MODEL, "input": "Hi"},
        }
        for n in range(3)
    ]
    async with served(cluster()) as api:
        batch = await run(api, given, "/v1/embeddings")
        output = await content(api, batch["output_file_id"])
    assert [one["response"]["body"]["object"] for one in output] == ["list"] * 3


FAULTS: list[tuple[list[Any], int, str, int]] = [
    ([line(1), "{"], 1, "invalid_json_line", 2),
    ([line(1), "", line(1)], 1, "duplicate_custom_id", 3),
    ([line(1) | {"method": "GET"}], 1, "invalid_method", 1),
    ([line(1) | {"url": "/v1/completions"}], 1, "mismatched_endpoint", 1),
    ([line(1) | {"custom_id": ""}], 1, "invalid_custom_id", 1),
    ([line(1) | {"body": 1}], 1, "invalid_json_line", 1),
    ([line(1, stop=[[]] * (MAX_CONTAINERS + 1))], 1, "invalid_json_line", 1),
    ([line(1, stream=True), line(2, slo_class="interactive")], 2, "invalid_request", 1),
    ([], 1, "empty_file", 1),
    ([{"custom_id": "x"}] * (limits.MAX_FAULTS + 5), limits.MAX_FAULTS, "invalid_json_line", 1),
]


@pytest.mark.parametrize(("given", "number", "code", "at"), FAULTS)
async def test_a_file_with_faults_fails_as_a_whole_and_says_where(
    given: list[Any], number: int, code: str, at: int
) -> None:
    async with served(cluster()) as api:
        batch = await run(api, given)
    assert (batch["status"], len(batch["errors"]["data"])) == ("failed", number)
    assert (batch["errors"]["data"][0]["code"], batch["errors"]["data"][0]["line"]) == (code, at)
    assert batch["output_file_id"] is None
    assert api.generator.generations == []


async def test_files_of_windows_are_read() -> None:
    given = [f"{json.dumps(line(n))}\r" for n in range(3)]
    async with served(cluster(says("Hello"))) as api:
        batch = await run(api, [f"\ufeff{given[0]}", *given[1:], "\r"])
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert batch["model"] == MODEL


async def test_of_a_file_of_empty_lines_few_are_read_and_others_have_their_turns() -> None:
    num_turns, lines = 0, b"\n" * CHUNK_BYTES

    async def others() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield lines

    reader = limits.LineReader(CHAT.path, CHUNK_BYTES)
    waiting = asyncio.create_task(others())
    assert [line async for found in reader.read(chunks()) for line in found] == []
    waiting.cancel()
    (fault,) = reader.faults
    assert (fault.code, fault.line) == ("too_many_lines", 2 * limits.MAX_LINES + 1)
    assert num_turns >= 300, "of 256 lines each"


async def test_lines_of_a_chunk_are_written_some_at_a_time() -> None:
    """18,000 short ones fit into a MiB: to write these keeps a database busy for a second."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b"".join(json.dumps(line(n)).encode() + b"\n" for n in range(600))

    reader = limits.LineReader(CHAT.path, CHUNK_BYTES)
    assert [len(found) async for found in reader.read(chunks())] == [256, 256, 88]


async def test_files_are_listed_read_and_deleted() -> None:
    async with served(cluster()) as api:
        long = "x" * (2 * CHUNK_BYTES + 17)
        files = [await upload(api, [f'"{long}"']), await upload(api, ["1"]), await upload(api, [])]
        assert files[0]["bytes"] == len(long) + 2
        assert (await content(api, files[0]["id"])) == [long]
        listed = await got(api, "/v1/files?order=asc&limit=2")
        assert listed["has_more"]
        rest = await got(api, f"/v1/files?order=asc&after={listed['last_id']}")
        ids = {file["id"] for file in (*listed["data"], *rest["data"])}
        assert (ids, rest["has_more"]) == ({file["id"] for file in files}, False)
        assert (await got(api, "/v1/files?purpose=batch_output"))["data"] == []
        async with api.client.delete(f"/v1/files/{files[0]['id']}") as response:
            assert (await response.json())["deleted"]
        await got(api, f"/v1/files/{files[0]['id']}", 404)
        await got(api, f"/v1/files/{files[0]['id']}/content", 404)
        kept = await upload(
            api, ["1"], **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        )
        assert kept["expires_at"] == kept["created_at"] + 3600


async def test_what_of_a_file_is_not_written_yet_is_counted_as_bodies_are() -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'

    async def parts() -> AsyncIterator[bytes]:
        bodies = api.server_context.bodies
        yield head + b"x" * (CHUNK_BYTES // 2)
        await until(lambda: bodies.num_bytes > CHUNK_BYTES // 4)
        yield b"x" * (CHUNK_BYTES // 8 * 5)  # with which there is a chunk to write
        await until(lambda: bodies.num_bytes < CHUNK_BYTES // 4)
        yield b"\r\n--b--\r\n"

    form = {"Content-Type": "multipart/form-data; boundary=b"}
    async with served(cluster()) as api:
        async with api.client.post("/v1/files", data=parts(), headers=form) as response:
            assert (await response.json())["error"]["param"] == "purpose"
        assert api.server_context.bodies.num_bytes == 0


async def test_a_file_that_is_too_large_is_refused_before_it_is_sent() -> None:
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000000000\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    )
    async with served(cluster()) as api, asyncio.timeout(DEADLINE_S):
        at = urlsplit(api.server.url)
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        writer.write(head.encode())
        assert b" 413 " in await reader.readline()
        writer.close()


async def test_a_chunk_has_memory_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many slow readers would hold one each, of which the few bytes on their way were counted."""
    read, seen = Files.read, []

    async def reading(files: Files, owner: str, file_id: str) -> AsyncIterator[bytes]:
        async for chunk in read(files, owner, file_id):
            seen.append(api.server._unread.num_bytes - len(chunk))
            yield chunk

    monkeypatch.setattr(Files, "read", reading)
    async with served(cluster()) as api:
        long = "x" * (2 * CHUNK_BYTES + 17)
        file = await upload(api, [f'"{long}"'])
        assert await content(api, file["id"]) == [long]
    assert len(seen) == 3
    assert min(seen) >= 0


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"purpose": "assistants", "file": "x"}, 400),
        ({"purpose": "batch"}, 400),
        ({"purpose": "batch", "file": "x", "what": "else"}, 400),
        ({"purpose": "batch", "file": "x", "expires_after[seconds]": "3600"}, 400),
    ],
)
async def test_forms_that_mean_nothing_are_refused(fields: dict[str, str], status: int) -> None:
    async with served(cluster()) as api:
        form = aiohttp.FormData()
        for name, value in fields.items():
            form.add_field(name, value, **({"filename": "f"} if name == "file" else {}))
        form.add_field("x", b"", filename="only a form with a file has parts")
        async with api.client.post("/v1/files", data=form) as response:
            assert response.status == status
        async with api.client.post("/v1/files", json={}) as response:
            assert response.status == 415
        headers = {"Origin": "https://elsewhere.example"}
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"x", filename="f")
        async with api.client.post("/v1/files", data=form, headers=headers) as response:
            assert response.status == 403, "a web page may send a form without asking"
        assert (await got(api, "/v1/files"))["data"] == []


@pytest.mark.parametrize(
    "head",
    [
        b'filename="a\0b"',
        b'filename="a"\r\nX: ' + b"x" * 10_000,
        b'filename="a"' + b"\r\nX: x" * 500,
    ],
    ids=["nul", "long", "many"],
)
async def test_headers_of_a_part_that_cannot_be_read_are_refused(head: bytes) -> None:
    part = (
        b'--b\r\nContent-Disposition: form-data; name="file"; ' + head + b"\r\n\r\nx\r\n--b--\r\n"
    )
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    async with (
        served(cluster()) as api,
        api.client.post("/v1/files", data=part, headers=form) as response,
    ):
        answer = await response.json()
    assert (response.status, answer["error"]["code"]) == (400, "invalid_request"), answer
    assert answer["error"]["message"].startswith("the form cannot be read: ")


@pytest.mark.parametrize(
    "name", [b'filename="a\xff"', b"filename*=UTF-8''a%00"], ids=["bytes", "nul"]
)
async def test_a_name_that_is_no_text_is_shown_as_one(name: bytes) -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    parts = part % (b"purpose", b"", b"batch") + part % (b"file", b"; " + name, b"x")
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    async with (
        served(cluster()) as api,
        api.client.post("/v1/files", data=parts + b"--b--", headers=form) as response,
    ):
        answer = await response.json()
    assert (response.status, answer.get("filename")) == (200, "a?"), answer


def test_usage_of_a_server_elsewhere_may_have_nulls() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": None}
    used = TokensUsed()
    for said in (usage, usage | {"prompt_tokens_details": {"cached_tokens": None}}, None):
        answer = json.dumps({"response": {"body": {"usage": said}}}).encode()
        add_used(used, AnsweredLine(1, "line-1", LineState.SUCCEEDED, answer))
    assert used == TokensUsed(input=14, output=6)


async def test_cancelling_keeps_what_is_done() -> None:
    gate = asyncio.Event()

    def script(request: Any) -> list[Any]:
        first = len(api.generator.generations) < 3
        ids = tokenizer().encode("Hello", add_special_tokens=False)
        pause = [] if first else [Pause(until=gate)]
        return [Tokens(ids), *pause, Tokens([EOS], FinishReason.STOP, EOS)]

    async with served(cluster(script)) as api:
        batch = await create(api, (await upload(api, [line(n) for n in range(50)]))["id"])
        async with asyncio.timeout(DEADLINE_S):
            while (await got(api, f"/v1/batches/{batch['id']}"))["request_counts"]["completed"] < 3:
                await asyncio.sleep(0.01)
        async with api.client.post(f"/v1/batches/{batch['id']}/cancel") as response:
            assert (await response.json())["status"] == "cancelling"
        batch = await ended(api, batch)
        assert (batch["status"], batch["cancelled_at"] is not None) == ("cancelled", True)
        assert batch["request_counts"]["completed"] == 3
        assert len(await content(api, batch["output_file_id"])) == 3
        left = await content(api, batch["error_file_id"])
        assert {one["error"]["code"] for one in left} == {"batch_cancelled"}
        assert len(left) == 47
        running = [g for g in api.generator.generations if not g.is_over]
        assert running
        assert all(generation.cancels for generation in running)
        async with api.client.post(f"/v1/batches/{batch['id']}/cancel") as response:
            assert response.status == 400


@pytest.mark.parametrize("error", matrix([NodeLost("gone"), Overloaded("full", 0.01)], 1))
async def test_what_is_no_fault_of_a_line_is_tried_again(error: Exception) -> None:
    refusals: list[Exception] = [error]

    def script(request: Any) -> list[Any]:
        return [refusals.pop()] if refusals else list(says("Hello")(request))

    async with served(cluster(script)) as api:
        batch = await run(api, [line(1)])
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        first, *others = api.generator.generations
        assert {g.request.request_id for g in others} == {first.request.request_id}
        refusals += [InvalidRequest("a fault of its own")]
        batch = await run(api, [line(1)])
        assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}


class FullDisk(SqliteDatabase):
    """Takes no answers until it has refused three."""

    num_refused = 0

    async def run(self, *steps: Step, **how: Any) -> list[list[Row]]:
        if self.num_refused < 3 and any(step[0] == tables.ANSWER for step in steps):
            self.num_refused += 1
            raise StoreUnavailable("the disk is full")
        return await super().run(*steps, **how)


async def test_an_answer_that_cannot_be_written_is_written_once_the_store_answers() -> None:
    database = FullDisk(None, tables.SCHEMA)
    async with served(cluster(), jobs=database) as api:
        batch = await run(api, [line(1)])
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert database.num_refused == 3
        assert len(api.generator.generations) == 1


async def test_another_coordinator_goes_on_and_every_line_is_there_once(tmp_path: Path) -> None:
    """The first one ends in the middle, three times; each line is answered the same as ever."""
    path, done = tmp_path / "jobs", 0
    given = [line(n) for n in range(40)]
    batch: Any = None
    for life in range(4):
        gate = asyncio.Event()

        def script(request: Any, life: int = life, gate: asyncio.Event = gate) -> list[Any]:
            steps = list(says(f"seed {request.sampling.seed}")(request))
            number = len(api.generator.generations)
            return steps if life == 3 or number < 9 else [*steps[:2], Pause(until=gate), *steps[2:]]

        async with served(cluster(script), jobs=open_jobs(path)) as api:
            if batch is None:
                batch = await create(api, (await upload(api, given))["id"])
            if life == 3:
                batch = await ended(api, batch)
                output = await content(api, batch["output_file_id"])
                break
            async with asyncio.timeout(DEADLINE_S):
                while (now := await got(api, f"/v1/batches/{batch['id']}"))["request_counts"][
                    "completed"
                ] < done + 9:
                    await asyncio.sleep(0.01)
            done = now["request_counts"]["completed"]
            await api.server.stop(grace_s=0.0)
            assert all(g.is_left for g in api.generator.generations if not g.is_over)
    assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert sorted(one["custom_id"] for one in output) == sorted(one["custom_id"] for one in given)
    assert len({one["response"]["body"]["id"] for one in output}) == 40


async def test_what_goes_wrong_once_does_not_end_all_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beat, faults = BatchRunner._beat, [ValueError("nobody thought of it")]

    async def failing(runner: BatchRunner) -> None:
        if faults:
            raise faults.pop()
        await beat(runner)

    monkeypatch.setattr(BatchRunner, "_beat", failing)
    async with served(cluster()) as api:
        assert (await run(api, [line(1)]))["status"] == "completed"
    assert not faults


async def test_a_coordinator_that_has_lost_a_batch_ends_its_lines(tmp_path: Path) -> None:
    """Else it would begin those that are left, and each would take calls from the other."""
    database = open_jobs(tmp_path / "jobs")
    gate, batches = asyncio.Event(), Batches(database)
    paused = [Tokens([5]), Pause(until=gate), Tokens([EOS], FinishReason.STOP, EOS)]
    async with served(cluster(lambda _: list(paused)), jobs=database) as api:
        batch = await create(api, (await upload(api, [line(n) for n in range(9)]))["id"])
        generations = api.generator.generations
        async with asyncio.timeout(DEADLINE_S):
            while len(generations) < 9:
                await asyncio.sleep(0.01)
            await batches.release(None)
            while not await batches.claim("other", 1e9):
                await batches.release(None)
            while not all(generation.cancels for generation in generations):
                await asyncio.sleep(0.01)
        assert (await got(api, f"/v1/batches/{batch['id']}"))["request_counts"]["failed"] == 0
        assert len(generations) == 9
        await batches.release(None)
        gate.set()
        assert (await ended(api, batch))["request_counts"]["completed"] == 9


async def test_a_file_that_is_deleted_while_it_is_read_is_no_shorter_one() -> None:
    class Deleted(SqliteDatabase):
        """Deletes the file once its first chunk has been read."""

        async def run(self, *steps: Step, **how: Any) -> list[list[Row]]:
            found = await super().run(*steps, **how)
            if steps[0][0] == tables.GET_CHUNK:
                file_id = steps[0][1]
                row: Step = ("DELETE FROM pdserve_files WHERE id = ?", file_id)
                await super().run(row, *((tables.DROP_CHUNK, file_id, n) for n in range(9)))
            return found

    async with served(cluster(), jobs=Deleted(None, tables.SCHEMA)) as api:
        rest = json.dumps(line(1)) + "\n"
        filler = " " * (CHUNK_BYTES - len(rest)) + rest  # so the chunk ends with a line
        batch = await run(api, [filler[:-1], *(line(n) for n in range(2, 4))])
    assert batch["status"] == "failed"
    assert [one["code"] for one in batch["errors"]["data"]] == ["file_not_found"]


async def test_lines_wait_while_others_do_not_begin_and_tenants_share(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    tables = [
        f'[tenants.{name}]\nkeys = ["{hash_key(name)}"]\nclasses = ["standard", "interactive"]\n'
        'default_class = "standard"\n'
        for name in ("a", "b")
    ]
    file.write_text("".join(tables))
    clock, gate = ManualClock(), asyncio.Event()
    tenants = Tenants(KeyBook(file, {}, ("standard", "interactive"), clock), None, MODEL, clock)
    generator = cluster(lambda request: [Pause(until=gate), *says("Hi")(request)])
    async with served(generator, tenants=tenants) as api:
        batches = {}
        for name in ("a", "b"):
            api.client.headers["Authorization"] = f"Bearer {name}"
            batches[name] = await create(
                api, (await upload(api, [line(n) for n in range(30)]))["id"]
            )
            if name == "a":
                await generator.started.wait()
            else:
                await got(api, f"/v1/batches/{batches['a']['id']}", 404)
        assert 0 < len(generator.generations) <= 8
        await ended(api, batches["b"], "in_progress")
        gate.set()
        for name in ("a", "b"):
            api.client.headers["Authorization"] = f"Bearer {name}"
            assert (await ended(api, batches[name]))["status"] == "completed"
        owners = [g.request.slo.tenant for g in generator.generations]
        assert owners.index("b") < 30, "neither waits until the other has ended"
        assert {g.request.slo.name for g in generator.generations} == {"standard"}
    tenants.close()


async def test_a_batch_is_its_tenants_whatever_becomes_of_the_key(tmp_path: Path) -> None:
    file, clock, gate = tmp_path / "keys.toml", ManualClock(), asyncio.Event()

    def write(*keys: str) -> None:
        table = f"[tenants.a]\nkeys = {[hash_key(key) for key in keys]}\n"
        file.write_text(f'{table}default_class = "standard"\n')
        clock.advance(LOOK_S)

    write("first", "second")
    tenants = Tenants(KeyBook(file, {}, ("standard", "interactive"), clock), None, MODEL, clock)
    generator = cluster(lambda request: [Pause(until=gate), *says("Hi")(request)])
    async with served(generator, tenants=tenants) as api:
        api.client.headers["Authorization"] = "Bearer first"
        batch = await create(api, (await upload(api, [line(n) for n in range(20)]))["id"])
        await generator.started.wait()
        write("second")
        await got(api, f"/v1/batches/{batch['id']}", 401)
        gate.set()
        api.client.headers["Authorization"] = "Bearer second"
        told = await ended(api, batch)
    assert told["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    tenants.close()


async def test_lines_that_begin_alike_run_together() -> None:
    def asked(number: int) -> dict[str, Any]:
        system = {"role": "system", "content": "AB"[number % 2] * 100}
        return line(number, messages=[system, {"role": "user", "content": str(number)}])

    async with served(cluster(says("Hi"))) as api:
        await run(api, [asked(n) for n in range(20)])
        prompts = [
            tokenizer().decode(g.request.prompt.token_ids) for g in api.generator.generations
        ]
    kinds = ["A" * 9 in prompt for prompt in prompts]
    assert sum(a != b for a, b in pairwise(kinds)) == 1


async def test_lines_wake_no_cluster_and_wait_for_none() -> None:
    generator = cluster()
    nodes, generator.nodes = generator.nodes, []
    async with served(generator) as api:
        batch = await create(api, (await upload(api, [line(1)]))["id"])
        batch = await ended(api, batch, "in_progress")
        for _ in range(5):
            batch = await got(api, f"/v1/batches/{batch['id']}")
        assert (batch["status"], generator.generations) == ("in_progress", [])
        generator.nodes = nodes
        assert (await ended(api, batch))["request_counts"]["completed"] == 1


class CountedDatabase(SqliteDatabase):
    """Counts looks for batches, and looks for what may be deleted."""

    num_looks = num_tidied = 0

    async def run(self, *steps: Step, **how: Any) -> list[list[Row]]:
        self.num_looks += any(step[0] == tables.CLAIM for step in steps)
        self.num_tidied += any(step[0] == tables.OLD_BATCHES for step in steps)
        return await super().run(*steps, **how)


async def test_a_database_of_its_own_is_left_alone_while_there_is_no_batch() -> None:
    database = CountedDatabase(None, tables.SCHEMA)
    context = SimpleNamespace(tasks=SimpleNamespace(is_draining=False))
    runner = BatchRunner(database, context, {}, beat_s=0.001)  # type: ignore[arg-type]
    runner.begin()
    await until(lambda: database.num_tidied > 2)
    assert database.num_looks <= database.num_tidied + 1, "one beat in 60"
    await runner.close()
