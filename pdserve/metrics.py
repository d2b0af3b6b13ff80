"""Prometheus metrics: names, labels and buckets. One registry per process.

Gauges and counters that are read at the scrape are named where they are read, for nodes in
`pdserve/node/reports/gauges.py`. Latencies of requests have the names that vLLM uses, with our
prefix.

Durations are in seconds, sizes in bytes. TTFT, TPOT and ITL are the coordinator's view, counted
from receipt of the request; the phases come from the nodes that ran them (`protocol.PhaseTimes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import pdserve
from pdserve.protocol import NodeRole, PhaseTimes, Sickness
from pdserve.shared.process.loop_watch import LoopWatch
from pdserve.shared.prometheus.collectors import (
    QuickCounter,
    QuickHistogram,
    QuickHistograms,
    ReadCounter,
    ReadCounters,
    ReadGauges,
)

LONG_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHORT_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# From 0.1 ms to 10 s by factors of 1.2: percentiles are accurate to a tenth.
FINE_BUCKETS_S = tuple(round(0.0001 * 1.2**n, 7) for n in range(64))
TOKEN_BUCKETS = (0, *(2**n for n in range(4, 18)))
RATIO_BUCKETS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

# Fields of `protocol.HandoffHops`, in order. The last hop of a handoff is the wait for a step.
_HOPS = {
    "apply": "end of prefill -> its node has applied the step and made the record",
    "queue": "-> it writes the record to the session",
    "travel": "-> the decode node reads it",
    "turn": "-> it begins to pull the last part, with waiting for room",
    "pull": "-> all KV is there",
    "adopt": "-> the engine has the request",
}


class _Registry:
    """The metrics of one process.

    All names begin with `pdserve_`, except those that every Prometheus client has of its process:
    memory, processor time, open files and start.
    """

    def __init__(self, *, is_whole: bool = True) -> None:
        """`is_whole`: not only those of a part of what the process does."""
        self.registry = CollectorRegistry()
        self.labels: dict[str, tuple[str, ...]] = {}  # of each sample, by its name
        if not is_whole:
            return
        ProcessCollector(registry=self.registry)
        self._named("build_info", ("version",))
        Info("pdserve_build", "What this process runs", registry=self.registry).info(
            {"version": pdserve.__version__}
        )

    def exposition(self) -> bytes:
        """The text of GET /metrics, at once. Servers use `Exposition` instead."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """Yield the text of each metric, as it is when its turn comes."""
        for family in self.registry.collect():
            yield generate_latest(_One(family))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> QuickHistogram:
        histogram = QuickHistogram(self._named_histogram(name, ()), text, buckets)
        self.registry.register(histogram)
        return histogram

    def _histograms(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> QuickHistograms:
        histograms = QuickHistograms(self._named_histogram(name, labels), text, buckets, labels)
        self.registry.register(histograms)
        return histograms

    def _counter(self, name: str, text: str, *labels: str) -> QuickCounter:
        counter = QuickCounter(self._named(name, labels, "_total"), text, labels)
        self.registry.register(counter)
        return counter

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(self._named(name, labels), text, labels, registry=self.registry)

    def _named(self, name: str, labels: tuple[str, ...], suffix: str = "") -> str:
        """Return a metric's full name; the labels of its samples are noted."""
        full_name = f"pdserve_{name}"
        self.labels[f"{full_name}{suffix}"] = labels
        return full_name

    def _named_histogram(self, name: str, labels: tuple[str, ...]) -> str:
        for suffix in ("_count", "_sum"):
            self._named(name, labels, suffix)
        return self._named(name, (*labels, "le"), "_bucket")

    def watch_loop(self, watch: LoopWatch) -> None:
        """Add how late the process's event loop was."""
        text = "Longest time in the last minute that the event loop was late"
        self.watch("event_loop_lag_seconds", text, watch.longest_lag_s)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read at each scrape."""
        self._gauge(name, text).set_function(read)

    def watch_each(
        self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        """Add one gauge per key of what `read` returns at the scrape, with the key as label."""
        self.registry.register(ReadGauges(self._named(name, (label,)), text, label, read))

    def count(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a counter that is kept elsewhere and read at each scrape."""
        self.registry.register(ReadCounter(self._named(name, (), "_total"), text, read))

    def count_each(
        self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        """As `watch_each`, of counters."""
        self.registry.register(
            ReadCounters(self._named(name, (label,), "_total"), text, label, read)
        )


def pieces_of_all(whole: _Registry, models: Mapping[str, _Registry]) -> Iterator[bytes]:
    """Yield the text of each metric of a process; those of its models have their names as label."""
    if not models:
        yield from whole.pieces()
        return
    families: dict[str, Metric] = {}
    for name, metrics in (("", whole), *models.items()):
        for family in metrics.registry.collect():
            samples = family.samples
            if name:
                samples = [s._replace(labels=s.labels | {"model": name}) for s in samples]
            known = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            known.samples += samples
    for family in families.values():
        yield generate_latest(_One(family))


class _One(Collector):
    """A single metric, for `generate_latest`."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        """As Collector.collect."""
        yield self._family


class CoordinatorMetrics(_Registry):
    """What clients experience, and the phases that it consists of."""

    def __init__(self, *, is_whole: bool = True) -> None:
        """`is_whole`: not only those of one of several models."""
        super().__init__(is_whole=is_whole)
        self._add_requests()
        self._add_latencies()
        self._add_phases()
        self._add_handoff()
        self._add_routing()
        self._add_service_classes()
        self._add_prefixes()

    def _add_requests(self) -> None:
        self.requests = self._counter("requests", "Requests by outcome", "outcome")
        self.refused = self._counter(
            "requests_refused",
            "Requests refused on arrival, by reason: ttft, tpot, inflight, or waiting (line full)",
            "slo_class",
            "reason",
        )
        self.cascade_tiers = self._counter(
            "cascade_tiers",
            "Tiers of cascades that were asked, by what came of it: answered, or why the next was",
            "cascade",
            "model",
            "outcome",
        )
        self.interruptions = self._counter(
            "request_interruptions",
            "Requests taken from their nodes to go on elsewhere, by reason: node_lost, or the code "
            "of a leg's error",
            "reason",
        )
        self.revision_requests = self._counter(
            "revision_requests",
            "Requests by their nodes' revision, and how they left these nodes: ok, the code of an "
            "error, or why they were interrupted",
            "revision",
            "outcome",
        )
        self.revision_ttft = self._histograms(
            "revision_time_to_first_token_seconds",
            "Receipt -> first token of requests that ended well, by their nodes' revision",
            LONG_BUCKETS_S,
            "revision",
        )
        self.revision_tpot = self._histograms(
            "revision_time_per_output_token_seconds",
            "Mean time per token after the first of requests that ended well, by their nodes' "
            "revision",
            SHORT_BUCKETS_S,
            "revision",
        )
        self.interruption_gap = self._histogram(
            "request_interruption_seconds", "Interruption -> next token", LONG_BUCKETS_S
        )
        self.move_pause = self._histogram(
            "request_move_seconds",
            "A stream's last token from its node, to move -> its next one from another node",
            FINE_BUCKETS_S,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens found in a prefix cache")
        self.output_tokens = self._counter("generation_tokens", "Tokens sent to clients")

    def _add_latencies(self) -> None:
        """What the client sees."""
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Receipt -> first token", LONG_BUCKETS_S
        )
        self.tpot = self._histogram(
            "time_per_output_token_seconds",
            "(end to end - TTFT) / (output tokens - 1), per request",
            SHORT_BUCKETS_S,
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Gap between two tokens of a request", SHORT_BUCKETS_S
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Receipt -> last token", LONG_BUCKETS_S
        )

    def _add_phases(self) -> None:
        self.queue = self._histogram(
            "request_queue_time_seconds", "Accepted by a node -> first scheduled", LONG_BUCKETS_S
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds",
            "First scheduled -> first token sampled",
            LONG_BUCKETS_S,
        )
        self.transfer = self._histogram(
            "request_transfer_time_seconds", "Time in which KV bytes were copied", SHORT_BUCKETS_S
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "Joined the decode batch -> last token", LONG_BUCKETS_S
        )

    def _add_handoff(self) -> None:
        """The way from a prefill node's last step to a decode node's first, and its parts."""
        self.handoff = self._histogram(
            "request_handoff_seconds",
            "End of prefill -> first decode step with the request in it",
            FINE_BUCKETS_S,
        )
        self.handoff_copy = self._histogram(
            "request_handoff_copy_seconds", "Part of the handoff: copying KV", FINE_BUCKETS_S
        )
        self.handoff_room = self._histogram(
            "request_handoff_room_seconds",
            "Part of the handoff: waiting for a place and for blocks",
            FINE_BUCKETS_S,
        )
        self.handoff_step = self._histogram(
            "request_handoff_step_seconds",
            "Part of the handoff: waiting for the next step",
            FINE_BUCKETS_S,
        )
        self.handoff_message = self._histogram(
            "request_handoff_message_seconds",
            "Part of the handoff: the rest, which is messages and their processing",
            FINE_BUCKETS_S,
        )
        self.handoff_overhead = self._histogram(
            "request_handoff_overhead_seconds", "Handoff minus copying KV", FINE_BUCKETS_S
        )
        self.handoff_hops = {
            hop: self._histogram(
                f"request_handoff_{hop}_seconds", f"Hop of the handoff: {text}", FINE_BUCKETS_S
            )
            for hop, text in _HOPS.items()
        }
        self.transfer_tail = self._histogram(
            "request_transfer_tail_seconds",
            "End of prefill -> all KV and the record have arrived, minus waiting for room",
            FINE_BUCKETS_S,
        )

    def _add_routing(self) -> None:
        self.decision = self._histogram(
            "placement_seconds",
            "Time to choose a request's nodes, including hashing its prompt",
            FINE_BUCKETS_S,
        )
        self.placements = self._counter(
            "placements", "Requests by placement: pair, local or prefill only", "side"
        )
        self.ttft_ratio = self._histogram(
            "ttft_ratio", "Actual / predicted time from placement to token 1", RATIO_BUCKETS
        )
        self.held = self._histogram(
            "token_one_held_seconds",
            "How long token 1 was held back for a full decode node, if it was",
            LONG_BUCKETS_S,
        )
        self.nodes_lost = self._counter("nodes_lost", "Nodes lost without a drain", "role")
        for role in NodeRole:
            self.nodes_lost.labels(role.name.lower())  # at 0, so that the first one is an increase
        self.nodes_sick = self._counter(
            "nodes_sick", "Nodes that reported that they cannot compute any more", "reason"
        )
        for kind in Sickness:
            self.nodes_sick.labels(kind)  # as above
        self.role_changes = self._counter("role_changes", "Nodes moved to another pool", "role")

    def _add_service_classes(self) -> None:
        """What each class was promised, and got."""
        self.class_requests = self._counter(
            "slo_requests", "Requests by class, without invalid ones", "slo_class"
        )
        self.class_attained = self._counter(
            "slo_attained",
            "Requests that kept ttft, tpot, or both; refused and failed ones never keep both",
            "slo_class",
            "slo",
        )
        self.class_ttft = self._histograms(
            "slo_ttft_seconds", "TTFT by class", LONG_BUCKETS_S, "slo_class"
        )
        self.class_tpot = self._histograms(
            "slo_tpot_seconds", "TPOT by class", SHORT_BUCKETS_S, "slo_class"
        )
        self.class_waited = self._histograms(
            "slo_waited_seconds",
            "Time that requests waited in the coordinator's line, if they had to, by class",
            LONG_BUCKETS_S,
            "slo_class",
        )

    def _add_prefixes(self) -> None:
        """Where prompts stopped matching what was cached."""
        self.prefix_break = self._histogram(
            "prefix_break_tokens",
            "Length of a prompt's longest cached prefix, if it could have been longer",
            TOKEN_BUCKETS,
        )
        self.prefix_unstable_position = self._histogram(
            "prefix_unstable_position_tokens",
            "Position of a change in a prompt that is followed by text of earlier prompts",
            TOKEN_BUCKETS,
        )
        self.prefix_unstable_tokens = self._counter(
            "prefix_unstable_tokens", "Prompt tokens recomputed only because of such a change"
        )

    def observe_prefill_leg(self, times: PhaseTimes) -> None:
        """Phases reported by the node that computed the prompt; a resumed stream had no prefill."""
        self.queue.observe(times.queue_s)
        if times.prefill_s:
            self.prefill.observe(times.prefill_s)

    def observe_decode_leg(self, times: PhaseTimes, *, was_handed_off: bool) -> None:
        """Phases reported by the node that decoded; one that resumed has not joined its batch."""
        if times.decode_s:
            self.decode.observe(times.decode_s)
        if was_handed_off:
            self.transfer.observe(times.transfer_s)
            self._observe_handoff(times)

    def _observe_handoff(self, times: PhaseTimes) -> None:
        tail_s = times.handoff_s - times.handoff_room_s - times.handoff_step_s
        self.handoff.observe(times.handoff_s)
        self.handoff_copy.observe(times.handoff_copy_s)
        self.handoff_room.observe(times.handoff_room_s)
        self.handoff_step.observe(times.handoff_step_s)
        self.handoff_message.observe(max(0.0, tail_s - times.handoff_copy_s))
        self.handoff_overhead.observe(times.handoff_s - times.handoff_copy_s)
        self.transfer_tail.observe(tail_s)
        if times.handoff_hops is not None:
            for hop, histogram in self.handoff_hops.items():
                histogram.observe(getattr(times.handoff_hops, f"{hop}_s"))


class NodeMetrics(_Registry):
    """The steps of a node's engine."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self._counter("steps", "Engine steps")
        self.step_time = self._histogram(
            "step_seconds", "Time of a step in the model", SHORT_BUCKETS_S
        )
        self.step_overhead = self._histogram(
            "step_overhead_seconds",
            "Period of a step minus the model: planning, batch, sampling, messages",
            FINE_BUCKETS_S,
        )
        self.room_wait = self._histogram(
            "room_wait_seconds",
            "First announcement of a handoff -> blocks reserved for it",
            SHORT_BUCKETS_S,
        )
        self.batch_requests = self._histogram("batch_requests", "Requests in a step", SIZE_BUCKETS)
        self.batch_tokens = self._histogram("batch_tokens", "Tokens in a step", SIZE_BUCKETS)
        self.decode_precision_tokens = self._counter(
            "decode_precision_tokens",
            "Prompt tokens computed here for lack of prefill nodes, which have other weights",
        )
