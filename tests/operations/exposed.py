"""What the processes of a cluster expose: every sample with its labels, as in the code."""

from __future__ import annotations

from unittest.mock import MagicMock

from coordinator.models.files import read_model_files
from coordinator.runtime import Coordinator
from coordinator.tenants import Tenants
from coordinator.tenants.readers import Readers
from decode_node.service import DecodeNode
from pdserve.measured.perf_model import PerfModel
from pdserve.metrics import NodeMetrics
from pdserve.node.reports import gauges
from pdserve.settings.config import CoordinatorConfig, NodeConfig, RoutingConfig
from pdserve.shared.clock import SystemClock
from pdserve.shared.slo import DEFAULT_CLASS, DEFAULT_CLASSES, parse_slo_classes
from prefill_node.service import PrefillNode

# Set by Prometheus: `node` and `role` come from GET /metrics/targets.
OF_TARGETS = {"job", "instance"}
OF_NODES = {"node", "role"}
OF_PROCESSES = {  # by prometheus-client
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
}


async def exposed() -> dict[str, set[str]]:
    """Sample name |-> the labels that it can have in Prometheus.

    Parts of a coordinator need an event loop.
    """
    samples: dict[str, set[str]] = {}
    for metrics, of_target in (
        (_of_coordinator(), OF_TARGETS),
        (_of_nodes(), OF_TARGETS | OF_NODES),
    ):
        own = metrics | dict.fromkeys(OF_PROCESSES | {"up"}, ())
        for name, labels in own.items():
            samples.setdefault(name, set()).update({*labels, *of_target})
    return samples


def _of_coordinator() -> dict[str, tuple[str, ...]]:
    config = CoordinatorConfig(routing=RoutingConfig(price=["decode=2"]))
    files = read_model_files(config.checkpoint, config.answers)
    classes = parse_slo_classes(DEFAULT_CLASSES, DEFAULT_CLASS)
    tenants = Tenants(None, None, files.name, SystemClock())
    metrics = Coordinator(config, [files], classes, tenants, Readers(tenants))._metrics
    metrics.watch_loop(MagicMock())
    return metrics.labels


def _of_nodes() -> dict[str, tuple[str, ...]]:
    metrics = NodeMetrics()
    for name in dir(gauges):
        if name.startswith("watch_"):
            watch = getattr(gauges, name)
            watch(metrics, *[MagicMock()] * (watch.__code__.co_argcount - 1))
    for service in (PrefillNode, DecodeNode):
        service(MagicMock(metrics=metrics, config=NodeConfig(), perf=PerfModel()))
    metrics.watch_loop(MagicMock())
    return metrics.labels
