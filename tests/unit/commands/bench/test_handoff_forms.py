"""Clusters that differ in how KV passes a network, and what is told of them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pdserve.commands.bench.handoff.config import HandoffBenchConfig
from pdserve.commands.bench.handoff.forms import (
    FormReport,
    FormRow,
    cluster_of,
    table_of,
)
from pdserve.commands.cli.main import main
from pdserve.settings.config import CheckpointConfig
from pdserve.shared.simulated_link import parse_link

LINK = "* * bandwidth=1e6"


def test_clusters_differ_in_the_form_alone() -> None:
    config = HandoffBenchConfig(
        wire=["raw", "lossless", "int8"], links=[LINK], checkpoint=CheckpointConfig(model="m")
    )
    raw, lossless, int8 = (cluster_of(config, form) for form in config.wire)
    assert [parse_link(link).is_raw for link in raw.handoff.links] == [True]
    assert lossless.handoff.links == int8.handoff.links == [LINK]
    dtypes = [cluster.engine.wire_dtype for cluster in (raw, lossless, int8)]
    assert dtypes == ["auto", "auto", "int8"]
    for cluster in (raw, lossless, int8):
        assert (cluster.transports, cluster.checkpoint.model) == (["tcp"], "m")


def test_forms_are_compared_with_the_first() -> None:
    rows = [
        FormRow("raw", "raw", 100, 450, 430, 1.0, 1.0),
        FormRow("int8", "int8 1.88x", 101, 250, 215, 1.8, 2.0),
    ]
    said = io.StringIO()
    Console(file=said, width=160).print(table_of(FormReport([4096, 4096], [LINK], rows)))
    line = next(line for line in said.getvalue().splitlines() if "1.88x" in line)
    assert [cell.strip() for cell in line.split("│")[3:-1]] == ["101", "250", "1.80", "215", "2.00"]


def test_forms_without_a_network_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "handoff", "--wire=raw,int8"]) == 2
    assert "give the network, as in --links" in capsys.readouterr().err
