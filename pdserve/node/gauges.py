"""What a node's load report says, and the same and more as metrics."""

from __future__ import annotations

from kv_transfer.statistics import ExporterStatistics, PullerStatistics
from kv_transfer.tier import HostTier
from pdserve.engine.engine import StepReport
from pdserve.engine.preemption import PreemptionStatistics
from pdserve.metrics import NodeMetrics
from pdserve.node.prefix_exports import PrefixExports
from pdserve.node.prefix_fetch import PrefixFetchStatistics
from pdserve.node.services import Services
from pdserve.perf_model import PerfModel
from pdserve.protocol import LoadReport, NodeState


def load_report(
    services: Services, perf: PerfModel, state: NodeState, loading_progress: float
) -> LoadReport:
    """How the node is doing now."""
    engine = services.engine
    return LoadReport(
        state=state,
        role=services.role,
        loading_progress=loading_progress,
        queued_tokens=engine.queues.queued_tokens,
        running_requests=len(engine.queues.running),
        waiting_requests=services.num_waiting,
        free_blocks=engine.pool.num_free,
        cached_blocks=engine.pool.num_cached,
        pinned_blocks=services.num_pinned_blocks,
        step_time_s=engine.step_time_s,
        prefill_ratio=perf.prefill_ratio if perf.has_prefilled else 0.0,
        decode_ratio=perf.decode_ratio if perf.has_decoded else 0.0,
        links=services.sessions.links(),
    )


def watch_services(metrics: NodeMetrics, services: Services) -> None:
    """Gauges read when they are scraped, so that they are never out of date."""
    engine, pool = services.engine, services.engine.pool
    watch = metrics.watch
    watch("queue_tokens", "Prompt tokens not computed yet", lambda: engine.queues.queued_tokens)
    watch("running_requests", "Requests in the batch", lambda: len(engine.queues.running))
    watch("waiting_requests", "Requests without room yet", lambda: services.num_waiting)
    watch("legs", "Legs not ended yet", lambda: len(services.legs))
    watch("blocks", "KV blocks of the pool", lambda: pool.num_blocks)
    watch("free_blocks", "KV blocks that can be allocated", lambda: pool.num_free)
    watch("cached_blocks", "Free KV blocks that hold a prefix", lambda: pool.num_cached)
    watch("pinned_blocks", "KV blocks held for others to pull", lambda: services.num_pinned_blocks)


def watch_preemptions(metrics: NodeMetrics, preempted: PreemptionStatistics) -> None:
    """Why requests lost their KV, and how it came back."""
    count = metrics.count
    count("preemptions", "Requests whose KV was dropped", lambda: preempted.total)
    count("priority_preemptions", "For more important ones", lambda: preempted.for_priority)
    count("recalls", "Requests preempted whose KV was fetched", lambda: preempted.recalls)
    count("swapped_in_tokens", "Of those, from the host tier", lambda: preempted.swapped_tokens)
    count("repulled_tokens", "Of those, from other nodes", lambda: preempted.pulled_tokens)
    count("kept_tokens", "Of preempted ones, found in the pool", lambda: preempted.cached_tokens)
    count("recomputed_tokens", "Of preempted ones", lambda: preempted.computed_tokens)


def watch_perf(metrics: NodeMetrics, perf: PerfModel) -> None:
    """How well the performance model fits; steps with chunks of prompts are prefill steps."""
    watch = metrics.watch
    ratio, error = "Real to profiled times of", "|predicted / real - 1|, moving average, of"
    watch("perf_prefill_ratio", f"{ratio} prefill steps", lambda: perf.prefill_ratio)
    watch("perf_decode_ratio", f"{ratio} decode steps", lambda: perf.decode_ratio)
    watch("perf_prefill_error", f"{error} prefill steps", lambda: perf.prefill_error)
    watch("perf_decode_error", f"{error} decode steps", lambda: perf.decode_error)


def watch_transfers(
    metrics: NodeMetrics, exported: ExporterStatistics, pulled: PullerStatistics
) -> None:
    """Counters of both ends of the KV transfer."""
    count = metrics.count
    count("pulled_bytes", "KV bytes pulled", lambda: pulled.bytes)
    count("pull_seconds", "Seconds spent in complete pulls", lambda: pulled.seconds)
    count("pulls", "Complete pulls", lambda: pulled.pulls)
    count("pulls_stale", "Pulls of blocks that changed hands", lambda: pulled.stale)
    count("pulls_timed_out", "Pulls beyond their deadline", lambda: pulled.timeouts)
    count("pulls_cancelled", "Pulls given up", lambda: pulled.cancelled)
    count("pulls_failed", "Pulls whose exporter was lost or refused", lambda: pulled.failed)
    count("pulls_corrupt", "Pulls whose checksums did not fit", lambda: pulled.corrupt)
    count("pulls_retried", "Reads begun again over the same transport", lambda: pulled.retried)
    count("pulls_replanned", "Reads begun again over another transport", lambda: pulled.replanned)
    count("tickets_issued", "Tickets issued", lambda: exported.tickets_issued)
    count("pools_shared", "Pullers given access to the memory", lambda: exported.pools_shared)
    count("exports", "Pulls served here, complete and valid", lambda: exported.pulls_served)
    count("exported_bytes", "KV bytes sent to pullers", lambda: exported.bytes_sent)
    count("exports_stale", "Pulls served of blocks that changed hands", lambda: exported.stale)
    count("exports_refused", "Tickets, tokens or hellos refused", lambda: exported.refused)
    count("exports_broken", "Pulls whose puller went away or stalled", lambda: exported.broken)
    count("transport_garbage", "Connections that said nonsense", lambda: exported.garbage)
    count("transport_turned_away", "Connections beyond the limit", lambda: exported.turned_away)


def watch_prefix_fetches(metrics: NodeMetrics, fetched: PrefixFetchStatistics) -> None:
    """Counters of prefixes that were brought here instead of being computed."""
    count = metrics.count
    count("prefix_tokens", "Prompt tokens whose KV other nodes had", lambda: fetched.tokens)
    count("prefix_bytes", "KV bytes of prefixes that other nodes had", lambda: fetched.bytes)
    count("prefix_tier_tokens", "Prompt tokens out of the host tier", lambda: fetched.tier_tokens)
    count("prefix_declined", "Prefixes cheaper to compute than to pull", lambda: fetched.declined)
    count("prefix_crowded", "Prefixes there was no room for", lambda: fetched.crowded)
    count("prefix_failed", "Sources of prefixes that gave nothing", lambda: fetched.failed)
    count("prefix_replanned", "Sources asked after a failed one", lambda: fetched.replanned)
    count("prefix_timed_out", "Fetches of prefixes given up as too slow", lambda: fetched.timed_out)


def watch_prefix_exports(metrics: NodeMetrics, exports: PrefixExports) -> None:
    """What other nodes ask for."""
    count, asked = metrics.count, exports.statistics
    metrics.watch("prefix_held_blocks", "Held for queries", lambda: exports.num_held_blocks)
    count("prefix_queries", "Queries for prefix blocks", lambda: asked.queries)
    count("prefix_exported_blocks", "Prefix blocks ticketed for others", lambda: asked.blocks)
    count("prefix_curbed", "Queries given less than there was", lambda: asked.curbed)
    count("prefix_expired", "Prefix tickets that nobody settled in time", lambda: asked.expired)


def watch_tier(metrics: NodeMetrics, tier: HostTier) -> None:
    """The host tier."""
    count, moved = metrics.count, tier.statistics
    metrics.watch("tier_blocks", "KV blocks that the host tier can hold", lambda: tier.num_blocks)
    metrics.watch("tier_held_blocks", "KV blocks in the host tier", lambda: tier.num_held)
    count("tier_stored", "KV blocks copied to the host tier", lambda: moved.stored)
    count("tier_loaded", "KV blocks copied back from it", lambda: moved.loaded)
    count("tier_evicted", "KV blocks evicted from it", lambda: moved.evicted)
    count("tier_stale", "Loads of blocks that were evicted meanwhile", lambda: moved.stale)
    count("tier_bytes", "KV bytes copied to and from it", lambda: moved.bytes)


def observe_step(metrics: NodeMetrics, report: StepReport) -> None:
    """One step's histograms."""
    metrics.steps.inc()
    metrics.step_time.observe(report.model_s)
    metrics.step_overhead.observe(report.overhead_s)
    metrics.batch_requests.observe(len(report.rows))
    metrics.batch_tokens.observe(sum(row.num_tokens for row in report.rows))
