"""One line of a batch, until it has its answer."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from coordinator.api.answer.bodies import TierUsage
from coordinator.api.answer.run import WholeAnswer
from coordinator.api.context import ApiContext, RequestTrace
from coordinator.api.read.ask import Ask
from coordinator.external.errors import EndpointUnavailable
from coordinator.jobs.line_run import run_line
from coordinator.jobs.storage.batches import Batch, BatchDocument, Line
from tests.unit.coordinator.api.harness import served
from tests.unit.coordinator.jobs.played import cluster

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
