"""Members that a test plays: they are no more than what they have said, and an outbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import msgspec

from coordinator.admission import Admission
from coordinator.admission.decisions import Awaited
from coordinator.generation import Listener
from coordinator.nodes.registry import Member, Registry
from coordinator.prefixes.index import PromptHashes
from coordinator.requests.flow import Flow
from coordinator.requests.journey import Journey
from coordinator.requests.running import RunningRequest
from coordinator.requests.surroundings import FlowProcess, FlowTimes, WantedNodes
from coordinator.routing import Router
from pdserve._native import TokenRun
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import LoadReport, NodeRole, NodeState, Prompt, Slo, TokenEvent
from pdserve.shared.clock import Clock
from tests.fakes.hellos import node_hello
from tests.fakes.outbox import RecordingOutbox

NUM_BLOCKS = 100
TIMES = FlowTimes(request_s=60.0, resume_s=30.0)
NO_GAP = replace(TIMES, line_gap_s=0.0)  # the line is served in the next turn of the loop


def made_flow(
    registry: Registry,
    router: Router,
    admission: Admission,
    *,
    metrics: CoordinatorMetrics | None = None,
    clock: Clock | None = None,
    times: FlowTimes = TIMES,
    on_ended: Callable[[Journey, PromptHashes], None] = lambda journey, prompt: None,
    waits_for_nodes: bool = False,
    adapter_missing: Callable[[str], None] = lambda digest: None,
    until_awake: Callable[[Slo, Prompt], Awaited | None] = lambda slo, prompt: None,
) -> Flow:
    """A flow of requests for the model "m"."""
    metrics = metrics or CoordinatorMetrics()
    return Flow(
        registry,
        router,
        admission,
        metrics,
        model="m",
        times=times,
        clock=clock,
        wanted=WantedNodes(
            are_awaited=waits_for_nodes, adapter_missing=adapter_missing, until_awake=until_awake
        ),
        process=FlowProcess(on_ended=on_ended),
    )


def join(registry: Registry, node_id: str, role: NodeRole, **changes: object) -> Member:
    """A ready node joins; `changes` are fields of NodeHello."""
    hello = node_hello(node_id, role, num_blocks=NUM_BLOCKS, **changes)
    return registry.add(hello, RecordingOutbox())  # type: ignore[arg-type]


def said_to(member: Member) -> list[msgspec.Struct]:
    """What a member was sent."""
    outbox = member.outbox
    assert isinstance(outbox, RecordingOutbox)
    return outbox.sent


def report(registry: Registry, member: Member, role: NodeRole, **fields: object) -> None:
    """It says how it is doing."""
    load = LoadReport(state=NodeState.READY, role=role)
    registry.report(member, msgspec.structs.replace(load, **fields))


def listen(running: RunningRequest, listener: Listener) -> None:
    """Have all that is told of a request heard as events, also what is read from its run."""

    def read(run: TokenRun) -> None:
        for index, token_ids, _ in run.read():
            listener(TokenEvent(request_id="", index=index, token_ids=token_ids))

    running.listen(listener, read)


async def heard(running: RunningRequest) -> list[TokenEvent]:
    """All that is told of it, when it has ended; raises the error that it ended with."""
    events: list[TokenEvent] = []
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def listener(event: TokenEvent | Exception) -> None:
        if isinstance(event, Exception):
            over.set_exception(event)
            return
        events.append(event)
        if event.finish_reason is not None:
            over.set_result(None)

    listen(running, listener)
    async with asyncio.timeout(30):
        await over
    return events


async def output(running: RunningRequest) -> list[int]:
    """As `heard`, all its tokens."""
    return [token_id for event in await heard(running) for token_id in event.token_ids]
