"""`pdserve role` against a coordinator that answers what a test wants."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from pdserve.commands.cli.main import build_parser
from pdserve.commands.cli.running import role as role_command
from pdserve.protocol.status import ClusterStatus, NodeStatus
from pdserve.shared.errors import ClusterError, NodeNotFound, RoleRefused
from pdserve.shared.process.exit_codes import OK
from tests.fakes.http import serving


def node(node_id: str, role: str, running: int) -> NodeStatus:
    return NodeStatus(
        node_id=node_id,
        role=role,
        state="ready",
        loading_progress=1.0,
        incarnation="i",
        session_address="127.0.0.1:5000",
        metrics_address="127.0.0.1:5001",
        num_blocks=100,
        free_blocks=90,
        cached_blocks=40,
        pinned_blocks=3,
        queued_tokens=0,
        running_requests=running,
        waiting_requests=1 if running else 0,
        step_time_ms=12.34,
    )


STATUS = ClusterStatus(
    model="tiny",
    mode="disaggregated",
    ready=True,
    inflight=9,
    nodes=[node("a", "prefill", 2), node("b", "prefill", 0), node("c", "decode", 5)],
)


@asynccontextmanager
async def coordinator(status: int, body: object, asked: list[object]) -> AsyncIterator[str]:
    async def change(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.Response(
            status=status, body=body if isinstance(body, bytes) else msgspec.json.encode(body)
        )

    async def show(request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(STATUS))

    async with serving(web.post("/admin/role", change), web.get("/status", show)) as url:
        yield url


async def change(url: str, node_id: str, *, force: bool = False, **times: float) -> int:
    times = {"timeout_s": 5.0} | times
    return await asyncio.to_thread(role_command.run, url, node_id, "prefill", force=force, **times)


@pytest.mark.parametrize(
    ("node_id", "changed", "said"),
    [
        ("a", True, "a is a prefill node now; requests it had begun and is finishing: 3"),
        ("b", True, "b is a prefill node now"),
        ("b", False, "b is a prefill node already"),
    ],
)
async def test_a_change_is_told(node_id, changed, said, capsys):
    asked: list[object] = []
    async with coordinator(200, {"changed": changed}, asked) as url:
        assert await change(url + "/", node_id, force=True) == OK
    assert asked == [{"node": node_id, "role": "prefill", "timeout_s": 5.0, "force": True}]
    assert capsys.readouterr().out == f"{said}\n2 prefill, 1 decode\n"


@pytest.mark.parametrize("error", [NodeNotFound("attached: a, b, c"), RoleRefused("the only one")])
async def test_a_refusal_is_the_error_that_it_is(error):
    body = {"error": {"message": error.message, "type": "t", "param": None, "code": error.code}}
    async with coordinator(409, body, []) as url:
        with pytest.raises(type(error), match=error.message):
            await change(url, "a")


async def test_an_answer_of_something_else_is_a_cluster_error():
    async with coordinator(404, b"<html>", []) as url:
        with pytest.raises(ClusterError, match="answers 404, but not in a coordinator's form"):
            await change(url, "a")


async def test_no_coordinator_is_a_cluster_error():
    async with coordinator(200, {}, []) as url:
        pass
    with pytest.raises(ClusterError, match="no coordinator at"):
        await change(url, "a")


async def test_no_answer_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ClusterError, match=r"no answer from .* within 0\.2 s"):
            await change(url, "a", timeout_s=0.1, slack_s=0.1)


def test_node_role_and_options_are_read_from_the_command_line():
    arguments = build_parser().parse_args(["role", "a", "decode", "--timeout-s=3", "--force"])
    assert (arguments.node, arguments.role, arguments.url) == (
        "a",
        "decode",
        "http://127.0.0.1:8000",
    )
    assert (arguments.timeout_s, arguments.force) == (3.0, True)
