"""A call's trace through a real cluster, at a real collector."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from pdserve.settings.tracing import TracingConfig
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import MODEL
from tests.cluster.fleet import Fleet, fleet_config, running
from tests.otlp_receiver import attributes_of, receiving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARTS, TPOT = {"admission", "queue", "prefill", "decode"}, "gen_ai.server.time_per_output_token"


async def test_a_handed_off_call_is_one_trace(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms, instead of five seconds
    name = f"text_completion {MODEL}"
    async with receiving() as (receiver, url):
        tracing = TracingConfig(otlp_endpoint=url, sampling=0.0, metrics_s=0.5)
        config = fleet_config(tiny_checkpoint, tracing=tracing)
        async with running(Fleet(config)) as fleet, aiohttp.ClientSession(fleet.url) as client:
            body = {"model": MODEL, "prompt": make_prompt(400), "max_tokens": 8, "ignore_eos": True}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            for given in ({}, headers):
                async with client.post("/v1/completions", json=body, headers=given) as response:
                    assert response.status == 200, await response.text()
            await receiver.until(lambda: {span.name for span in receiver.spans} >= PARTS | {name})
            await receiver.until(lambda: TPOT in {point for point, _ in receiver.points()})
    (server,) = (span for span in receiver.spans if span.kind == 2)
    assert server.name == name
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE, PARENT)
    parts = {span.name: span for span in receiver.spans if span.parent_span_id == server.span_id}
    assert set(parts) >= PARTS
    assert attributes_of(parts["prefill"])["pdserve.node"] == "prefill-0"
    assert attributes_of(parts["decode"])["pdserve.node"] == "decode-0"
    for part in parts.values():
        assert server.start_time_unix_nano - 1e6 <= part.start_time_unix_nano
        assert part.start_time_unix_nano <= part.end_time_unix_nano
        assert part.end_time_unix_nano <= server.end_time_unix_nano + 1e6
    assert attributes_of(server)["gen_ai.usage.output_tokens"] == 8
