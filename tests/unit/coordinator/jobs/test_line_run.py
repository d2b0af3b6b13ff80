"""One line of a batch, until it has its answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

from coordinator.api.answer.bodies import TierUsage
from coordinator.api.answer.run import WholeAnswer
from coordinator.api.context import ApiContext, RequestTrace
from coordinator.api.read.ask import Ask
from coordinator.external.errors import EndpointUnavailable
from coordinator.jobs.batch_run import BatchRun
from coordinator.jobs.line_run import run_line
from coordinator.jobs.places import LinePlaces
from coordinator.jobs.storage.batches import Batch, BatchDocument, Line
from pdserve.shared.errors import NoNodeAvailable
from tests.unit.coordinator.api.harness import served
from tests.unit.coordinator.jobs.played import cluster
from tests.waits import turn

_DOCUMENT = BatchDocument(endpoint="/v1/chat/completions")
BATCH = Batch("batch_1", "", "batch", "in_progress", 0, 2**40, _DOCUMENT)
LINE = Line(1, "line-1", b"", b"")


async def test_a_line_is_memory_of_bodies_until_it_has_ended() -> None:
    """Of a cluster's lines that begin at a time, each may have 16 MiB."""
    held: list[int] = []

    class Plan:
        async def run(self, context: ApiContext, trace: RequestTrace) -> WholeAnswer:
            held.append(context.bodies.num_bytes)
            trace.release_body()
            held.append(context.bodies.num_bytes)
            return WholeAnswer(b"{}", {})

    async def planned(ask: Ask) -> Any:
        return Plan()

    async def body() -> bytes:
        return json.dumps({"prompt": "x" * 10_000}).encode()

    async with served(cluster()) as api:
        given = (BATCH, LINE, body, SimpleNamespace(plan=planned), api.server_context)
        assert (await run_line(*given, lambda: None)).is_good  # type: ignore[arg-type]
    assert held[0] >= 10_000
    assert held[1] == 0


async def test_a_line_whose_first_tiers_answer_in_vain_is_tried_ever_more_rarely() -> None:
    """Each try computes them again, at the tenant's cost, while a server elsewhere is away."""
    pauses: list[float] = []

    class Plan:
        has_tiers = True

        async def run(self, context: ApiContext, trace: RequestTrace) -> WholeAnswer:
            if len(pauses) == 12:
                return WholeAnswer(b"{}", {})
            if self.has_tiers:
                trace.tiers.append(TierUsage.of("small", None, 1, 0, 1))
            raise EndpointUnavailable("'big' is left alone for now", 7.0)

    async def planned(ask: Ask) -> Any:
        return Plan()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def body() -> bytes:
        return b"{}"

    async with served(cluster()) as api:
        given = (BATCH, LINE, body, SimpleNamespace(plan=planned), api.server_context)
        answer = await run_line(*given, lambda: None, pause)  # type: ignore[arg-type]
        assert answer.is_good
        assert pauses == [7.0, 7.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, *[300.0] * 4]
        pauses.clear()
        Plan.has_tiers = False
        await run_line(*given, lambda: None, pause)  # type: ignore[arg-type]
        assert pauses == [7.0] * 12


async def test_a_line_for_which_there_is_no_hope_has_failed_after_three_tries() -> None:
    pauses: list[float] = []

    async def planned(ask: Ask) -> Any:
        raise NoNodeAvailable("nodes cannot become those of this model", inf if pauses else 7.0)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def body() -> bytes:
        return b"{}"

    async with served(cluster()) as api:
        given = (BATCH, LINE, body, SimpleNamespace(plan=planned), api.server_context)
        answer = await run_line(*given, lambda: None, pause)  # type: ignore[arg-type]
    assert answer.status == 503
    assert b"nodes cannot become" in answer.body
    assert pauses == [7.0, 1.0, 1.0]


async def test_a_line_that_is_ended_before_it_begins_gives_its_place_back() -> None:
    """Its task never runs: of places that are lost, a coordinator would have none one day."""
    places, read = LinePlaces(), asyncio.get_running_loop().create_future()
    places.resize(1, 64, frozenset({""}))

    async def left(*_: object) -> list[Line]:
        return await read  # type: ignore[no-any-return]

    context = SimpleNamespace(tasks=SimpleNamespace(is_draining=False))
    parts: Any = (context, {}, SimpleNamespace(left=left), None, places, None)
    running = asyncio.create_task(BatchRun(BATCH, "me", *parts).run())
    await turn()
    read.set_result([LINE, replace(LINE, number=2)])
    running.cancel()  # in the turn of the loop in which its lines' tasks are made
    await asyncio.wait([running])
    assert places.num_running == 0
