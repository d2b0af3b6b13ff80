"""What a node's load report says, and the same and more as metrics."""

from __future__ import annotations

from kv_transfer.statistics import ExporterStatistics, PullerStatistics
from pdserve.engine.engine import StepReport
from pdserve.metrics import NodeMetrics
from pdserve.node.roles import Role
from pdserve.protocol import LoadReport, NodeState


def load_report(role: Role, state: NodeState, loading_progress: float) -> LoadReport:
    """How the node is doing now."""
    engine = role.engine
    return LoadReport(
        state=state,
        loading_progress=loading_progress,
        queued_tokens=engine.queues.queued_tokens,
        running_requests=len(engine.queues.running),
        waiting_requests=role.num_waiting,
        free_blocks=engine.pool.num_free,
        cached_blocks=engine.pool.num_cached,
        pinned_blocks=role.num_pinned_blocks,
        step_time_s=engine.step_time_s,
    )


def watch_role(metrics: NodeMetrics, role: Role) -> None:
    """Gauges read when they are scraped, so that they are never out of date."""
    engine, pool = role.engine, role.engine.pool
    watch = metrics.watch
    watch("queue_tokens", "Prompt tokens not computed yet", lambda: engine.queues.queued_tokens)
    watch("running_requests", "Requests in the batch", lambda: len(engine.queues.running))
    watch("waiting_requests", "Requests without room yet", lambda: role.num_waiting)
    watch("legs", "Legs not ended yet", lambda: len(role.legs))
    watch("blocks", "KV blocks of the pool", lambda: pool.num_blocks)
    watch("free_blocks", "KV blocks that can be allocated", lambda: pool.num_free)
    watch("cached_blocks", "Free KV blocks that hold a prefix", lambda: pool.num_cached)
    watch("pinned_blocks", "KV blocks held for others to pull", lambda: role.num_pinned_blocks)
    metrics.count(
        "preemptions", "Requests whose KV was dropped", lambda: engine.queues.num_preemptions
    )


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
    count("tickets_issued", "Tickets issued", lambda: exported.tickets_issued)
    count("exported_bytes", "KV bytes sent to pullers", lambda: exported.bytes_sent)
    count("exports_refused", "Tickets or hellos refused", lambda: exported.refused)
    count("transport_garbage", "Connections that said nonsense", lambda: exported.garbage)


def observe_step(metrics: NodeMetrics, report: StepReport) -> None:
    """One step's histograms."""
    metrics.steps.inc()
    metrics.step_time.observe(report.model_s)
    metrics.step_overhead.observe(report.overhead_s)
    metrics.batch_requests.observe(len(report.rows))
    metrics.batch_tokens.observe(sum(row.num_tokens for row in report.rows))
