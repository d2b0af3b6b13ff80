"""Whatever is counted can be seen."""

from __future__ import annotations

from dataclasses import fields

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kv_transfer.statistics import ExporterStatistics, PullerStatistics
from pdserve.metrics import NodeMetrics
from pdserve.node.prefixes.fetch import PrefixFetchStatistics
from pdserve.node.reports.gauges import watch_prefix_fetches, watch_sickness, watch_transfers
from pdserve.protocol import Sickness


def counted(metrics: NodeMetrics) -> list[float]:
    """The values of all counters."""
    families = text_string_to_metric_families(metrics.exposition().decode())
    return [sample.value for family in families for sample in family.samples]


@pytest.mark.parametrize("kind", [ExporterStatistics, PullerStatistics, PrefixFetchStatistics])
def test_every_count_of_the_transfers_is_a_metric(kind: type) -> None:
    metrics = NodeMetrics()
    parts = {k: k() for k in (ExporterStatistics, PullerStatistics, PrefixFetchStatistics)}
    watch_transfers(metrics, parts[ExporterStatistics], parts[PullerStatistics])
    watch_prefix_fetches(metrics, parts[PrefixFetchStatistics])
    for number, field in enumerate(fields(kind)):
        value = 1000.0 + number
        setattr(parts[kind], field.name, value)
        assert value in counted(metrics), field.name


def test_why_a_node_is_sick_is_a_metric() -> None:
    metrics, found = NodeMetrics(), list[Sickness]()
    watch_sickness(metrics, lambda: found[0] if found else None)

    def shown() -> list[str]:
        families = text_string_to_metric_families(metrics.exposition().decode())
        samples = [s for family in families for s in family.samples if s.name == "pdserve_sick"]
        assert {sample.labels["reason"] for sample in samples} == set(Sickness)
        return [sample.labels["reason"] for sample in samples if sample.value]

    assert shown() == []
    found.append(Sickness.of("engine_stuck: a step has not ended for 12 s") or Sickness.STEPS_FAIL)
    assert shown() == ["engine_stuck"]
