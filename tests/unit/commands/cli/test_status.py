import asyncio
import io
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web
from msgspec.structs import replace
from rich.console import Console

from pdserve.commands.cli.main import main
from pdserve.commands.cli.running import status as status_command
from pdserve.commands.cluster.status import fetch_status
from pdserve.protocol import DraftState, LinkState
from pdserve.protocol.status import (
    AdapterStatus,
    ClusterStatus,
    CoordinatorStatus,
    FailingPeer,
    NodeStatus,
    PrefixStatus,
)
from pdserve.shared.errors import ClusterError
from tests.fakes.http import serving


def node(node_id: str, state: str = "ready", progress: float = 1.0) -> NodeStatus:
    return NodeStatus(
        node_id=node_id,
        role=node_id.split("-")[0],
        state=state,
        loading_progress=progress,
        incarnation="i",
        session_address="127.0.0.1:5000",
        metrics_address="127.0.0.1:5001",
        num_blocks=100,
        free_blocks=90,
        cached_blocks=40,
        pinned_blocks=3,
        queued_tokens=512,
        running_requests=7,
        waiting_requests=2,
        step_time_ms=12.34,
        predicted_queue_ms=345.6,
        predicted_tpot_ms=23.45,
    )


STATUS = ClusterStatus(
    model="tiny",
    mode="disaggregated",
    ready=False,
    inflight=9,
    nodes=[node("decode-1"), node("prefill-0", "loading", 0.4), node("decode-0", "draining")],
)


def text_of(status: ClusterStatus) -> str:
    console = Console(width=160, file=io.StringIO())
    console.print(status_command.render(status))
    return console.file.getvalue()


def test_what_was_guessed_is_a_line() -> None:
    drafts = [DraftState("text", 8, 6), DraftState("model", 4, 1, 8 << 20, 2 << 20)]
    guessing = replace(node("decode-1"), drafts=drafts)
    assert (
        "decode-1 has guessed 8 tokens by text (75% right), 4 tokens by model (25% right), with 8 "
        "MiB of kv_memory for the model's own KV (25% in use)"
    ) in text_of(replace(STATUS, nodes=[guessing]))
    assert "guessed" not in text_of(STATUS)


def test_both_pools_are_shown_in_order():
    text = text_of(STATUS)
    assert text.startswith("tiny  disaggregated  not ready  9 in flight\n")
    words = ["prefill nodes", "prefill-0", "loading 40%", "decode nodes", "decode-0", "decode-1"]
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    for number in ("90/100", "12.3", "346", "23.4"):
        assert number in text


def test_all_numbers_fit_into_eighty_characters():
    console = Console(width=80, file=io.StringIO())
    console.print(status_command.render(STATUS))
    for number in ("90/100", "512", "12.3", "346", "23.4", "TPOT"):
        assert number in console.file.getvalue()


@pytest.mark.parametrize("width", [60, 72, 80, 100, 140])
def test_no_column_is_cut_in_a_narrow_terminal(width):
    """Those that matter least are left out instead."""
    large = msgspec.structs.replace(
        node("prefill-12", "loading", 1.0),
        num_blocks=163_840,
        free_blocks=163_840,
        queued_tokens=120_000,
        predicted_queue_ms=12_345.0,
    )
    console = Console(width=width, file=io.StringIO())
    console.print(status_command.render(msgspec.structs.replace(STATUS, nodes=[large])))
    text = console.file.getvalue()
    assert "…" not in text
    for cell in ("prefill-12", "loading 100%", "163840/163840", "12.3", "23.4"):
        assert cell in text
    assert ("127.0.0.1:5000" in text) == (width >= 100)


@pytest.mark.long
async def test_a_pipe_gets_all_columns():
    async with answering(200, msgspec.json.encode(STATUS)) as url:
        command = [sys.executable, "-m", "pdserve", "status", "--url", url]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
    assert out.decode().count("127.0.0.1:5000") == 3


def test_links_are_shown_with_the_reason_for_their_transport():
    reason = "shm: another host"
    linked = msgspec.structs.replace(
        node("decode-0"), links=[LinkState(peer="p-7", transport="tcp", reason=reason)]
    )
    text = text_of(msgspec.structs.replace(STATUS, nodes=[linked]))
    assert text.index("KV links") < text.index("p-7") < text.index("tcp") < text.index(reason)
    assert "KV links" not in text_of(STATUS)


def test_a_node_that_shares_no_transport_with_the_other_pool_is_told():
    lonely = msgspec.structs.replace(node("decode-0"), is_alone=True, transports=["ucx", "tcp"])
    told = "decode-0 shares no KV transport with any prefill node: it has ucx and tcp"
    assert told in " ".join(text_of(msgspec.structs.replace(STATUS, nodes=[lonely])).split())
    assert "shares no" not in text_of(STATUS)


def test_nodes_that_do_not_reach_each_other_are_told_once():
    failing = {"error": "peer_lost", "failures": 3, "next_try_s": 3.6}
    nodes = [
        msgspec.structs.replace(node(node_id), failing=[FailingPeer(peer=peer, **failing)])
        for node_id, peer in (("prefill-0", "decode-0"), ("decode-0", "prefill-0"))
    ]
    told = "handoffs from prefill-0 to decode-0 fail (peer_lost, 3 in a row, tried again in 4 s)"
    text = " ".join(text_of(msgspec.structs.replace(STATUS, nodes=nodes)).split())
    assert text.count(told) == text.count("handoffs") == 1
    assert "handoffs" not in text_of(STATUS)


def test_why_a_node_is_sick_is_told():
    reason = "engine_stuck: a step of 3 requests has not ended for 12 s"
    sick = msgspec.structs.replace(node("decode-0", "sick"), reason=reason)
    told = msgspec.structs.replace(STATUS, nodes=[sick])
    assert f"decode-0 is sick: {reason}" in text_of(told)
    assert told.waiting_for(["decode-0"]) == f"decode-0 (sick: {reason})"
    assert "sick" not in text_of(STATUS)


def test_a_cluster_without_nodes_says_so():
    assert "no node is attached" in text_of(msgspec.structs.replace(STATUS, nodes=[]))


def test_refusals_and_the_waiting_line_are_told_when_there_are_any():
    crowded = msgspec.structs.replace(STATUS, waiting=3, refused={"ttft": 2, "tpot": 0})
    assert "3 waiting for room  refused: 2 by ttft\n" in text_of(crowded)
    assert "refused" not in text_of(msgspec.structs.replace(STATUS, waiting=1))
    assert "waiting for room" not in text_of(STATUS)


def test_unstable_prompts_are_told_in_one_line():
    prefixes = PrefixStatus(cached_share=0.4, unstable_share=0.124, unstable_token=48)
    text = text_of(msgspec.structs.replace(STATUS, prefixes=prefixes))
    assert "40% of prompt tokens were in a prefix cache\n" in text
    assert (
        "12% of prompt tokens were recomputed because text at about token 48 changes between "
        "otherwise equal prompts\n"
    ) in text
    stable = msgspec.structs.replace(prefixes, unstable_share=0.001)
    assert "recomputed" not in text_of(msgspec.structs.replace(STATUS, prefixes=stable))


def test_who_is_waited_for():
    names = ["prefill-0", "decode-0", "decode-1", "decode-2"]
    assert STATUS.waiting_for(names) == (
        "prefill-0 (loading 40%), decode-0 (draining), decode-2 (not attached)"
    )
    assert STATUS.waiting_for(["decode-1"]) == ""


def test_adapters_of_the_settings_are_waited_for():
    """Else the first requests to them are refused; one that cannot be loaded stops nobody."""
    adapters = [
        AdapterStatus(name="sql", digest="a1"),
        AdapterStatus(name="poems"),
        AdapterStatus(name="bad", refusals={"": "no folder"}),
    ]
    loading = msgspec.structs.replace(STATUS, coordinator=CoordinatorStatus(adapters=adapters))
    assert loading.waiting_for(["decode-1"]) == "adapter poems (loading)"


@asynccontextmanager
async def answering(status: int, body: bytes) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    async with serving(web.get("/status", answer)) as url:
        yield url


async def test_a_status_is_read_and_unknown_fields_are_left_to_newer_versions():
    fields = msgspec.to_builtins(STATUS) | {"something_new": 1}
    async with answering(200, msgspec.json.encode(fields)) as url:
        assert await fetch_status(url + "/") == STATUS


@pytest.mark.parametrize(
    ("status", "body", "complaint"),
    [
        (404, b"", "answers 404"),
        (401, b"", "is for who has an API key or .*: set PDSERVE_API_KEY"),
        (200, b"<html>", "is not a cluster's status"),
        (200, b'{"model": "m"}', "is not a cluster's status: .*`version`"),
        (200, b'{"version": 1, "model": "m"}', "is not a cluster's status: .*`mode`"),
        (
            200,
            b'{"version": 0, "pools": []}',
            "status of version 0, but this pdserve reads version",
        ),
    ],
)
async def test_whatever_else_answers_is_refused(status, body, complaint):
    async with answering(status, body) as url:
        with pytest.raises(ClusterError, match=complaint):
            await fetch_status(url)


async def test_no_coordinator_is_a_cluster_error():
    async with answering(200, b"") as url:
        pass
    with pytest.raises(ClusterError, match="no coordinator at"):
        await fetch_status(url)


async def test_no_answer_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ClusterError, match=r"no answer from .* within 0\.1 s"):
            await fetch_status(url, timeout_s=0.1)


async def test_the_command_prints_json_for_programs(capsys):
    async with answering(200, msgspec.json.encode(STATUS)) as url:
        assert await asyncio.to_thread(main, ["status", "--json", "--url", url]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=ClusterStatus) == STATUS


@pytest.mark.parametrize("command", [["status"], ["record", "trace.jsonl"]], ids=" ".join)
def test_a_command_fails_in_one_line_when_nobody_answers(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--url", "http://127.0.0.1:1"]) == 1
    failed = (
        f"pdserve {command[0]}: error: no coordinator at http://127.0.0.1:1: Connect call failed"
    )
    assert capsys.readouterr().err.startswith(failed)
