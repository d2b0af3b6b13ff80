"""Names, labels and buckets of what processes observe; prometheus-client, one registry each.

What is only read when it is scraped has its name where it is read: `pdserve/node/gauges.py`.

Durations are in seconds, sizes in bytes. TTFT, TPOT and ITL are as the coordinator sees them, from
receipt of the request; the phases come from the nodes that ran them (`protocol.PhaseTimes`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pdserve.protocol import PhaseTimes

LONG_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHORT_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# A factor of 1.2 from 0.1 ms to 10 s: percentiles read from these are within a tenth.
FINE_BUCKETS_S = tuple(round(0.0001 * 1.2**n, 7) for n in range(64))
TOKEN_BUCKETS = (0, *(2**n for n in range(4, 18)))
RATIO_BUCKETS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class _Registry:
    """Metrics of one process, with the prefix `pdserve_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def exposition(self) -> bytes:
        """The text that GET /metrics answers with."""
        return generate_latest(self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(f"pdserve_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pdserve_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"pdserve_{name}", text, labels, registry=self.registry)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge whose value is read when it is scraped."""
        self._gauge(name, text).set_function(read)

    def watch_each(
        self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        """As `watch`: one gauge for each value of the label that there is at the moment."""
        self.registry.register(_ReadGauges(f"pdserve_{name}", text, label, read))

    def count(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A counter that somebody else keeps; read when it is scraped."""
        self.registry.register(_ReadCounter(f"pdserve_{name}", text, read))


class _ReadCounter(Collector):
    """prometheus-client's Counter cannot be set; this one only asks."""

    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name = name
        self._text = text
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._text, value=self._read())


class TokenHistogram(Collector):
    """A histogram that is told of every token: a tenth of what prometheus-client's costs.

    It has no lock, so one thread observes and scrapes.
    """

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._bounds = (*buckets, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """As prometheus-client asks."""
        bounds = map(floatToGoString, self._bounds)
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class _ReadGauges(Collector):
    """prometheus-client's Gauge keeps every label it has ever seen; this one only asks."""

    def __init__(
        self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        self._name = name
        self._text = text
        self._label = label
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._text, labels=[self._label])
        for value, level in self._read().items():
            family.add_metric([value], level)
        yield family


class CoordinatorMetrics(_Registry):
    """What clients experience, and how the phases add up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self._counter("requests", "Requests by how they ended", "outcome")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens accepted")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens found in a prefix cache")
        self.output_tokens = self._counter("output_tokens", "Tokens sent to clients")
        self.ttft = self._histogram("ttft_seconds", "Receipt -> first token", LONG_BUCKETS_S)
        self.tpot = self._histogram(
            "tpot_seconds",
            "(end to end - TTFT) / (output tokens - 1), per request",
            SHORT_BUCKETS_S,
        )
        self.itl = TokenHistogram("pdserve_itl_seconds", "Gap between two tokens", SHORT_BUCKETS_S)
        self.registry.register(self.itl)
        self.e2e = self._histogram("e2e_seconds", "Receipt -> last token", LONG_BUCKETS_S)
        self.queue = self._histogram(
            "request_queue_seconds", "Accepted by a node -> first scheduled", LONG_BUCKETS_S
        )
        self.prefill = self._histogram(
            "request_prefill_seconds", "First scheduled -> first token sampled", LONG_BUCKETS_S
        )
        self.transfer = self._histogram(
            "request_transfer_seconds", "KV bytes on their way", SHORT_BUCKETS_S
        )
        self.handover = self._histogram(
            "request_handover_seconds",
            "End of prefill -> first decode step with the request in it",
            FINE_BUCKETS_S,
        )
        self.handover_copy = self._histogram(
            "request_handover_copy_seconds", "Of the handover: copying KV", FINE_BUCKETS_S
        )
        self.handover_room = self._histogram(
            "request_handover_room_seconds", "Of the handover: waiting for room", FINE_BUCKETS_S
        )
        self.handover_step = self._histogram(
            "request_handover_step_seconds",
            "Of the handover: adopted -> the next step begins",
            FINE_BUCKETS_S,
        )
        self.handover_message = self._histogram(
            "request_handover_message_seconds",
            "Of the handover: the rest, which is messages and whoever handles them",
            FINE_BUCKETS_S,
        )
        self.handover_overhead = self._histogram(
            "request_handover_overhead_seconds", "The handover less copying KV", FINE_BUCKETS_S
        )
        self.transfer_tail = self._histogram(
            "request_transfer_tail_seconds",
            "End of prefill -> all KV and the record are here, less waiting for room",
            FINE_BUCKETS_S,
        )
        self.decode = self._histogram(
            "request_decode_seconds", "Joined the decode batch -> last token", LONG_BUCKETS_S
        )
        self.decision = self._histogram(
            "placement_seconds",
            "Choosing a request's nodes, hashing its prompt included",
            FINE_BUCKETS_S,
        )
        self.placements = self._counter(
            "placements", "Requests by who does what: pair, local or prefill only", "side"
        )
        self.ttft_ratio = self._histogram(
            "ttft_ratio", "Time from placing to token 1 / predicted", RATIO_BUCKETS
        )
        self.held = self._histogram(
            "token_one_held_seconds",
            "Time that token 1 was held back while decode nodes were full, of those that were",
            LONG_BUCKETS_S,
        )
        self.nodes_lost = self._counter("nodes_lost", "Nodes gone without having drained", "role")
        self.role_changes = self._counter(
            "role_changes", "Nodes that were told to change pools, and did", "role"
        )
        self._service_classes()
        self._prefixes()

    def _service_classes(self) -> None:
        """What each class was promised, and got."""
        self.class_requests = self._counter(
            "slo_requests",
            "Calls by class, without those that were wrong in themselves",
            "slo_class",
        )
        self.class_attained = self._counter(
            "slo_attained",
            "Of these: TTFT kept, TPOT kept, or both; never both of one refused or failed",
            "slo_class",
            "slo",
        )
        self.class_ttft = self._histogram(
            "slo_ttft_seconds", "TTFT by class", LONG_BUCKETS_S, "slo_class"
        )
        self.class_tpot = self._histogram(
            "slo_tpot_seconds", "TPOT by class", SHORT_BUCKETS_S, "slo_class"
        )
        self.class_waited = self._histogram(
            "slo_waited_seconds",
            "Time in the coordinator's line, of requests that had to wait, by class",
            LONG_BUCKETS_S,
            "slo_class",
        )
        self.refused = self._counter(
            "refused",
            "Requests refused on arrival: ttft, tpot, inflight, or waiting (too many are)",
            "slo_class",
            "reason",
        )

    def _prefixes(self) -> None:
        """Where prompts stopped matching what was cached."""
        self.prefix_break = self._histogram(
            "prefix_break_tokens",
            "Tokens of a prompt up to where its longest cached prefix ended, if it could be longer",
            TOKEN_BUCKETS,
        )
        self.prefix_unstable_position = self._histogram(
            "prefix_unstable_position_tokens",
            "Tokens of a prompt up to a change before text that earlier prompts had there, too",
            TOKEN_BUCKETS,
        )
        self.prefix_unstable_tokens = self._counter(
            "prefix_unstable_tokens", "Prompt tokens recomputed only because of such a change"
        )

    def observe_prefill_leg(self, times: PhaseTimes) -> None:
        """Phases reported by whichever node prefilled."""
        self.queue.observe(times.queue_s)
        self.prefill.observe(times.prefill_s)

    def observe_decode_leg(self, times: PhaseTimes, *, was_handed_over: bool) -> None:
        """Phases reported by the node that decoded."""
        self.decode.observe(times.decode_s)
        if was_handed_over:
            self.transfer.observe(times.transfer_s)
            self._observe_handover(times)

    def _observe_handover(self, times: PhaseTimes) -> None:
        tail_s = times.handover_s - times.handover_room_s - times.handover_step_s
        self.handover.observe(times.handover_s)
        self.handover_copy.observe(times.handover_copy_s)
        self.handover_room.observe(times.handover_room_s)
        self.handover_step.observe(times.handover_step_s)
        self.handover_message.observe(max(0.0, tail_s - times.handover_copy_s))
        self.handover_overhead.observe(times.handover_s - times.handover_copy_s)
        self.transfer_tail.observe(tail_s)


class NodeMetrics(_Registry):
    """How a node is doing, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self._counter("steps", "Engine steps")
        self.step_time = self._histogram(
            "step_seconds", "The model's part of a step", SHORT_BUCKETS_S
        )
        self.step_overhead = self._histogram(
            "step_overhead_seconds",
            "A step's period less the model: planning, batch, sampling, messages",
            SHORT_BUCKETS_S,
        )
        self.room_wait = self._histogram(
            "room_wait_seconds",
            "Requests handed over: first announcement -> blocks for them here",
            SHORT_BUCKETS_S,
        )
        self.batch_requests = self._histogram("batch_requests", "Requests in a step", SIZE_BUCKETS)
        self.batch_tokens = self._histogram("batch_tokens", "Tokens in a step", SIZE_BUCKETS)
