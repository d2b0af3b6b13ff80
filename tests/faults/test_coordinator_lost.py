"""Coordinators come late, come twice, die and come back; the nodes outlive all of it.

One prefill and one decode node, told of two coordinators. The second one is started by the tests.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.settings.answers import AnswerConfig
from tests.architecture.repository import ROOT
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import DEADLINE_S, MODEL, Client, EventStream, Follower
from tests.cluster.fleet import (
    HEARD_S,
    Fleet,
    SecondCoordinator,
    assert_free,
    fleet_config,
    poll,
    running,
)
from tests.matrix import matrix

NODES = ("prefill-0", "decode-0")
STREAMED = 300
LONG = 12_000
KEYED = 800
NUM_LINES = 40  # of a batch


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def second(tiny_checkpoint: Path) -> AsyncIterator[SecondCoordinator]:
    """Not started yet."""
    coordinator = SecondCoordinator(tiny_checkpoint)
    yield coordinator
    coordinator.release_ports()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(
    tiny_checkpoint: Path, second: SecondCoordinator, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fleet]:
    both = [f"--coordinators={second.grpc_address}"]
    store = str(tmp_path_factory.mktemp("state") / "store.sqlite")
    answers = AnswerConfig(store=store)
    config = fleet_config(tiny_checkpoint, engine={"token_budget": 64}, answers=answers)
    async with running(Fleet(config, dict.fromkeys(NODES, both))) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="session")
async def client(pair: Fleet) -> AsyncIterator[Client]:
    await pair.assert_baseline()
    async with Client(pair.url) as client:
        yield client
    await pair.assert_baseline()


async def knows_both(pair: Fleet) -> bool:
    """Whether its coordinator has heard of the other one; nodes tell each of them by itself."""
    return (await pair.status()).coordinators == 2


async def test_two_coordinators_share_the_nodes(
    pair: Fleet, client: Client, second: SecondCoordinator
) -> None:
    """The second one is started when the nodes have long been looking for it; then it is killed."""
    expected = (await client.complete(make_prompt(30), STREAMED)).tokens
    async with second, Client(second.url) as other:
        await second.wait_ready(NODES)
        await poll(lambda: knows_both(pair), HEARD_S, lambda: "the first one knows of no other")
        mine = Follower(client, make_prompt(30), STREAMED)
        theirs = Follower(other, make_prompt(30), STREAMED)
        assert (await mine.end()).tokens == (await theirs.end()).tokens == expected

        mine = Follower(client, make_prompt(30), STREAMED)
        doomed = [Follower(other, make_prompt(30, i), 5000) for i in range(3)]
        await asyncio.gather(*(f.reached(3) for f in (mine, *doomed)))
        doomed.append(Follower(other, make_prompt(LONG), 5000))  # in its prompt, or not far beyond
        second.child.send_signal(signal.SIGKILL)
        for follower in doomed:
            assert (await follower.end(HEARD_S)).is_broken
        assert (await mine.end()).tokens == expected
        await pair.assert_baseline()
    async with second, Client(second.url) as other:  # on the same ports
        await second.wait_ready(NODES)
        assert (await other.complete(make_prompt(30), STREAMED)).tokens == expected


async def test_without_its_coordinator_a_node_frees_everything_and_waits(
    pair: Fleet, client: Client
) -> None:
    incarnations = {node.node_id: node.incarnation for node in (await pair.status()).nodes}
    addresses = await pair.metrics_addresses()
    decoding = [Follower(client, make_prompt(30, i), 5000) for i in range(3)]
    await asyncio.gather(*(follower.reached(3) for follower in decoding))
    pair.send_signal("decode-0", signal.SIGSTOP)  # so KV that is there stays where it is
    prefilling = Follower(client, make_prompt(LONG, "coordinator"), 5)
    await pair.wait_for("prefill-0", lambda gauges: gauges["pinned_blocks"] > 0)
    await pair.kill_node(COORDINATOR)
    pair.send_signal("decode-0", signal.SIGCONT)
    for follower in (*decoding, prefilling):
        assert (await follower.end(HEARD_S)).is_broken
    await assert_free(addresses.values())
    await pair.restart_coordinator()
    nodes = (await pair.status()).nodes
    assert {node.node_id: node.incarnation for node in nodes} == incarnations
    assert len((await client.complete(make_prompt(30), 20)).tokens) == 20


async def stop_at_once(second: SecondCoordinator) -> None:
    """As if its time to drain were over: by a second signal, once it has heard the first."""

    async def has_heard() -> bool:
        try:
            async with aiohttp.request("GET", f"{second.url}/health"):
                return False
        except aiohttp.ClientConnectionError:
            return True

    second.child.send_signal(signal.SIGTERM)
    await poll(has_heard, HEARD_S, lambda: "it still listens")
    second.child.send_signal(signal.SIGTERM)


async def kill(second: SecondCoordinator) -> None:
    second.child.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    ("sampling", "end"),
    matrix([({"temperature": 1.0, "logprobs": 2}, kill), ({"temperature": 0}, stop_at_once)], 1),
    ids=["killed", "stopped"],
)
async def test_a_keyed_stream_goes_on_at_another_coordinator(
    pair: Fleet,
    client: Client,
    second: SecondCoordinator,
    sampling: dict[str, float],
    end: Callable[[SecondCoordinator], Coroutine[Any, Any, None]],
) -> None:
    """Its coordinator ends in mid-stream; the client comes back to the other one."""
    num_claimed = (await pair.gauges("decode-0"))["claimed_streams"]
    asked = {"key": str(sampling), "prompt": make_prompt(30, str(sampling)), **sampling}
    asked["max_tokens"] = KEYED
    async with second:
        await second.wait_ready(NODES)
        stream = EventStream(second.url, **asked)
        ending: list[asyncio.Task[None]] = []
        await stream.read(20, lambda: ending.append(asyncio.create_task(end(second))))
        await asyncio.gather(*ending)
        assert 20 <= len(stream.events) < KEYED
    again = EventStream(client.url, last_id=stream.last_id, **asked)
    await again.read(0)
    whole = EventStream(client.url, **asked)
    await whole.read(0)
    assert again.is_done
    assert stream.events + again.events == whole.events
    assert len(whole.token_ids) == KEYED
    listed = [event["choices"][0].get("logprobs") for event in whole.events]
    num_scored = sum(len(scores["token_logprobs"]) for scores in listed if scores)
    assert num_scored == KEYED * ("logprobs" in sampling)
    assert (await pair.gauges("decode-0"))["claimed_streams"] == num_claimed + 1


def program(name: str) -> list[str]:
    """The command line of an example."""
    name, *options = name.split()
    if name.endswith(".py"):
        return [sys.executable, str(ROOT / "examples" / name), *options]
    if (node := shutil.which("node")) is None:
        pytest.skip("no node is installed")
    return [node, str(ROOT / "examples" / name)]


@pytest.mark.long  # a keyed stream does by default
@pytest.mark.parametrize("name", matrix(["resuming.py", "resuming.py --async", "resuming.mjs"], 1))
async def test_a_stream_of_an_sdk_outlives_its_coordinator(
    pair: Fleet, client: Client, second: SecondCoordinator, name: str
) -> None:
    """The SDK sends neither a key nor ids of events: the transports of the examples do."""

    async def written(*urls: str, once_begun: Callable[[], None] = lambda: None) -> str:
        child = await asyncio.create_subprocess_exec(*program(name), *urls, stdout=PIPE)
        assert child.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            begun = await child.stdout.readexactly(20)
            once_begun()
            text = begun + await child.stdout.read()
            assert await child.wait() == 0
        return text.decode()

    undisturbed = await written(pair.url)
    async with second:
        await second.wait_ready(NODES)
        kill = partial(second.child.send_signal, signal.SIGKILL)
        assert await written(second.url, pair.url, once_begun=kill) == undisturbed


def text_of(response: dict[str, Any]) -> str:
    (message,) = response["output"]
    return str(message["content"][0]["text"])


async def test_what_was_stored_outlives_its_coordinator(pair: Fleet) -> None:
    """Whoever was told that something is stored finds it after kill -9."""
    async with aiohttp.ClientSession(pair.url) as session:

        async def post(path: str, **body: Any) -> dict[str, Any]:
            async with session.post(path, json=body) as response:
                assert response.status == 200, await response.text()
                return dict(await response.json())

        async def get(path: str) -> dict[str, Any]:
            async with session.get(path) as response:
                assert response.status == 200, await response.text()
                return dict(await response.json())

        async def finished(body: dict[str, Any]) -> dict[str, Any]:
            async with asyncio.timeout(HEARD_S):
                while body["status"] in ("queued", "in_progress"):
                    await asyncio.sleep(0.05)  # nothing tells a client that polls
                    body = await get(f"/v1/responses/{body['id']}")
            return body

        talk = await post("/v1/conversations", metadata={"of": "foxes"})
        asked = {"model": MODEL, "max_output_tokens": 8, "temperature": 0}
        told = await post("/v1/responses", input="hello", conversation=talk["id"], **asked)
        long = {"input": "go on", "background": True, **asked, "temperature": 1, "seed": 5}
        long["max_output_tokens"] = KEYED
        undisturbed = await finished(await post("/v1/responses", **long))
        running = await post("/v1/responses", **long)
        await pair.wait_for("decode-0", lambda gauges: gauges["running_requests"] > 0)
        await pair.restart_coordinator()
        assert await get(f"/v1/responses/{told['id']}") == told
        assert (await get(f"/v1/conversations/{talk['id']}"))["metadata"] == {"of": "foxes"}
        items = (await get(f"/v1/conversations/{talk['id']}/items"))["data"]
        assert {item["role"] for item in items} == {"user", "assistant"}
        again = await finished(await get(f"/v1/responses/{running['id']}"))
        assert again["created_at"] == running["created_at"]
        for field in ("status", "usage"):
            assert again[field] == undisturbed[field]
        assert text_of(again) == text_of(undisturbed)
        more = await post(
            "/v1/responses", input="and then?", previous_response_id=told["id"], **asked
        )
        assert more["status"] in ("completed", "incomplete")
    await pair.assert_baseline()


@pytest.mark.long  # a coordinator in this process does by default
async def test_each_line_of_a_batch_is_answered_once_whoever_dies(pair: Fleet) -> None:
    """The coordinator is killed in mid-batch, again and again; the next one goes on."""
    asked = {"model": MODEL, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {**asked, "prompt": make_prompt(30, f"line {number % 4}")},
        }
        for number in range(NUM_LINES)
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    async with aiohttp.ClientSession(pair.url) as session:

        async def told(path: str, body: Any = None, **form: Any) -> Any:
            sent = session.post(path, json=body, **form) if body or form else session.get(path)
            async with sent as response:
                assert response.status == 200, await response.text()
                return json.loads(f"[{','.join((await response.text()).splitlines())}]")

        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", text, filename="lines.jsonl")
        (file,) = await told("/v1/files", data=form)
        wanted = {"endpoint": "/v1/completions", "completion_window": "24h"}
        (batch,) = await told("/v1/batches", {"input_file_id": file["id"], **wanted})

        async def has_done(number: int) -> Any:
            (now,) = await told(f"/v1/batches/{batch['id']}")
            batch.update(now)
            return bool(
                now["status"] == "completed" or now["request_counts"]["completed"] >= number
            )

        for number in (1, NUM_LINES // 2):
            await poll(partial(has_done, number), DEADLINE_S, lambda: f"{batch}")
            assert batch["status"] == "in_progress"
            await pair.restart_coordinator()
        await poll(partial(has_done, len(lines) + 1), DEADLINE_S, lambda: f"{batch}")
        assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        output = await told(f"/v1/files/{batch['output_file_id']}/content")
    assert sorted(one["custom_id"] for one in output) == sorted(one["custom_id"] for one in lines)
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in output}
    kinds = {(int(name.partition("-")[2]) % 4, told) for name, told in texts.items()}
    assert len(kinds) == 4, "greedy answers to one prompt are the same, whoever gave them"
    await pair.assert_baseline()
