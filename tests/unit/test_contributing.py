"""The code in CONTRIBUTING.md does what is said of it, each in the place that it is written for."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.puller import Puller
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.models.families import FAMILIES
from pdserve.engine.prompts import PromptOrder
from pdserve.measured.perf_model import PerfModel
from pdserve.settings.flags import add_flags, config_from
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import StaleTicket
from pdserve.shared.fair_share import FairShare
from tests.architecture.repository import ROOT
from tests.checkpoints import edit_config, make_checkpoint
from tests.reference import Reference
from tests.requests import make_request
from tests.unit.engine_model.harness import Node, make_prompt
from tests.unit.kv_transfer.pairs import SMALL, make_pool, tokens_of

BLOCKS: dict[str, str] = dict(
    re.findall(
        r"^```python\n# (\w+)\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.M
    )
)


def written(name: str) -> dict[str, Any]:
    """What the block of that name defines."""
    names: dict[str, Any] = {"__name__": "contributing"}
    exec(compile(BLOCKS[name], f"CONTRIBUTING.md: {name}", "exec", dont_inherit=True), names)
    return names


def test_no_block_is_left_out() -> None:
    assert set(BLOCKS) == {"family", "policy", "transport", "metric", "benchmark"}
    assert (ROOT / "CONTRIBUTING.md").read_text().count("```python") == len(BLOCKS)


def test_a_model_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arithmetic is Granite's, by which transformers computes the reference."""
    path = make_checkpoint(tmp_path / "cedar", "granite")
    prompt = make_prompt(50)
    expected = Reference(path).logits(prompt)
    edit_config(path, architectures=["CedarForCausalLM"], model_type="cedar")
    monkeypatch.setitem(FAMILIES, "CedarForCausalLM", FAMILIES["LlamaForCausalLM"])
    written("family")  # replaces it, until the end of the test
    assert FAMILIES["CedarForCausalLM"].model_type == "cedar"
    assert (Node.load(path).logits(prompt) - expected).abs().max() < 3e-4


def test_a_policy() -> None:
    rule = written("policy")["ShortAnswersFirst"]()
    order = PromptOrder(rule, FairShare(), PerfModel(), ManualClock(), 512)
    requests = [make_request(10, max_tokens=max_tokens) for max_tokens in (30, 10, 20)]
    ordered = order.sorted(requests, BlockPool(16, 4))
    assert [request.sampling.max_tokens for request in ordered] == [10, 20, 30]


async def test_a_transport() -> None:
    """A pull arrives as it was; one of blocks that were used again since does not count."""
    kind = written("transport")["FILE"]
    source, destination = make_pool(SMALL, 8, seed=1), make_pool(SMALL, 8)
    identity = KvIdentity("a-model", "main", SMALL)
    exporter = Exporter("p0", "life-1", identity, source, ManualClock(), [kind])
    puller = Puller(destination, identity, host_id(), [kind])
    await exporter.start("127.0.0.1")
    link = await puller.connect(exporter.welcome(), timeout_s=30)
    try:
        assert link.transport == "file"
        ticket = exporter.issue("r", 0, 10, [5, 2, 7])
        await puller.pull(link, ticket, [1, 3, 4], 0, 30)
        there = tokens_of(destination, SMALL, [1, 3, 4], 0, 10)
        assert (there == tokens_of(source, SMALL, [5, 2, 7], 0, 10)).all()
        source.generations[2] += 1
        with pytest.raises(StaleTicket):
            await puller.pull(link, ticket, [1, 3, 4], 0, 30)
    finally:
        await link.close()
        await puller.close()
        await exporter.close()
        source.close()
        destination.close()


def test_a_metric() -> None:
    metrics = written("metric")["Metrics"]()
    metrics.translated.labels("batch").inc()
    assert b'pdserve_translated_total{slo_class="batch"} 1.0' in metrics.exposition()


async def test_a_benchmark() -> None:
    names = written("benchmark")
    parser = argparse.ArgumentParser()
    add_flags(parser, names["WakeBenchConfig"])
    config = config_from(names["WakeBenchConfig"], parser.parse_args(["--wakes=3"]))
    late_s = await names["lateness_s"](config)
    assert len(late_s) == 3
    assert min(late_s) > -0.001
