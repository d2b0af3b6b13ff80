"""A node's load report, and its metrics that are read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp
from typing import Final

from kv_transfer.statistics import ExporterStatistics, PullerStatistics
from kv_transfer.tier import HostTier
from pdserve.engine.drafts.speculation import Speculation
from pdserve.engine.drafts.texts import Texts
from pdserve.engine.interface import StepReport
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.kv.shortage import PreemptionStatistics
from pdserve.measured.perf_model import PerfModel
from pdserve.metrics import NodeMetrics
from pdserve.node.prefixes.exports import PrefixExports
from pdserve.node.prefixes.fetch import PrefixFetchStatistics
from pdserve.node.prefixes.store.node_store import NodeStore
from pdserve.node.roles import NodeParts
from pdserve.node.services import Services
from pdserve.node.split_cores.phases import Phases
from pdserve.protocol import LoadReport, NodeState, Sickness

MEMORY_S: Final = 5.0  # after which a third of what was seen still counts


class BusyShare:
    """Moving averages. A step is seen when it ends, and one longer than the looks counts on."""

    def __init__(self, perf: PerfModel, now_s: float) -> None:
        self._perf = perf
        self._looked_s = now_s
        self._busy_s = 0.0  # that no look has counted yet
        self._prompt_s = 0.0  # of these
        self._share = 0.0
        self.prompts = 0.0  # the share, as of the last look, in which prompts were computed

    def stepped(self, report: StepReport, share: float = 1.0) -> None:
        """Note a step that had this share of the node's cores."""
        busy_s = report.period_s * share
        of_prompts = 1.0 if report.of_prompts else self._perf.prompt_share(report.shape)
        self._busy_s += busy_s
        self._prompt_s += busy_s * of_prompts

    def share(self, now_s: float) -> float:
        """Return the share, at most 1."""
        passed_s = now_s - self._looked_s
        if passed_s > 0:
            weight = 1 - exp(-passed_s / MEMORY_S)
            seen_s = min(passed_s, self._busy_s)
            of_prompts = self._prompt_s / self._busy_s if self._busy_s else 0.0
            self._share += weight * (seen_s / passed_s - self._share)
            self.prompts += weight * (of_prompts * seen_s / passed_s - self.prompts)
            self._busy_s = min(self._busy_s - seen_s, MEMORY_S)
            self._prompt_s = of_prompts * self._busy_s
            self._looked_s = now_s
        return self._share


def load_report(
    services: Services, parts: NodeParts, state: NodeState, loading_progress: float, now_s: float
) -> LoadReport:
    """The node's state and load, for its coordinators."""
    engine = services.engine
    prefill_ratio, decode_ratio = parts.perf.known_ratios(now_s)
    return LoadReport(
        state=state,
        role=services.role,
        loading_progress=loading_progress,
        queued_tokens=services.queued_tokens,
        running_requests=len(engine.queues.running),
        waiting_requests=services.num_waiting,
        free_blocks=engine.pool.num_within_reach,
        cached_blocks=engine.pool.num_cached,
        pinned_blocks=services.num_pinned_blocks,
        step_time_s=engine.step_time_s,
        prefill_ratio=prefill_ratio,
        decode_ratio=decode_ratio,
        links=services.sessions.links(),
        drafts=parts.speculation.states(),
        no_drafts=parts.no_drafts,
    )


def watch_services(metrics: NodeMetrics, services: Services) -> None:
    """Requests and blocks."""
    engine, pool = services.engine, services.engine.pool
    watch = metrics.watch
    watch("queue_tokens", "Prompt tokens not computed yet", lambda: services.queued_tokens)
    watch("running_requests", "Requests in the batch", lambda: len(engine.queues.running))
    watch("waiting_requests", "Requests that wait for room", lambda: services.num_waiting)
    watch("legs", "Legs in progress", lambda: len(services.legs))
    watch("adapters", "Adapters that are loaded", lambda: services.num_adapters)
    text = "Streams of lost coordinators that went on at another one"
    metrics.count("claimed_streams", text, lambda: services.num_claimed)
    watch("blocks", "KV blocks of the pool", lambda: pool.num_in_all)
    watch("free_blocks", "KV blocks that can be allocated", lambda: pool.num_within_reach)
    watch("kv_cache_usage_ratio", "Share of KV blocks in use", lambda: _share_in_use(pool))
    watch("cached_blocks", "Free KV blocks that hold a prefix", lambda: pool.num_cached)
    watch("pinned_blocks", "KV blocks held for others to pull", lambda: services.num_pinned_blocks)


def watch_split_cores(metrics: NodeMetrics, phases: Phases) -> None:
    """The cores of a node that computes both phases side by side."""
    text = "Cores that the kernels of the last step with"
    metrics.watch("decode_step_cores", f"{text} decodes had", lambda: phases.decodes.mean_cores)
    metrics.watch("prompt_step_cores", f"{text} prompts had", lambda: phases.prompts.mean_cores)


def watch_sickness(metrics: NodeMetrics, sickness: Callable[[], Sickness | None]) -> None:
    """Whether the node can compute, until it ends."""
    metrics.watch_each(
        "sick",
        "1 if the node cannot compute any more for this reason; it then ends",
        "reason",
        lambda: {kind: float(kind is sickness()) for kind in Sickness},
    )


def _share_in_use(pool: BlockPool) -> float:
    return 1 - pool.num_within_reach / max(1, pool.num_in_all)


def watch_preemptions(metrics: NodeMetrics, preempted: PreemptionStatistics) -> None:
    """Preemptions, and where the KV of preempted requests came from when they resumed."""
    count, what = metrics.count, "Tokens of resumed requests"
    count("preemptions", "Requests preempted", lambda: preempted.total)
    count("priority_preemptions", "Of these, for a higher priority", lambda: preempted.for_priority)
    count("recalls", "Resumed requests whose KV was fetched", lambda: preempted.recalls)
    count("swapped_in_tokens", f"{what} from the host tier", lambda: preempted.swapped_tokens)
    count("repulled_tokens", f"{what} from other nodes", lambda: preempted.pulled_tokens)
    count("kept_tokens", f"{what} still in the pool", lambda: preempted.cached_tokens)
    count("recomputed_tokens", f"{what} computed again", lambda: preempted.computed_tokens)


def watch_drafts(metrics: NodeMetrics, speculation: Speculation) -> None:
    """Tokens that were guessed, and those of them that were right: each saves a step's turn.

    And what it takes to compute guesses.
    """
    count, drafts, works = metrics.count_each, speculation.counts, speculation.works
    text = "Tokens guessed and computed"
    count("draft_tokens", text, "source", lambda: {n: s.drafted for n, s in drafts.items()})
    text = "Of these, right"
    count(
        "accepted_draft_tokens", text, "source", lambda: {n: s.accepted for n, s in drafts.items()}
    )
    text = "Seconds in which a draft model, or head, computed"
    count("draft_model_seconds", text, "source", lambda: {n: w.seconds for n, w in works.items()})
    text = "Tokens that it computed: of prompts, of answers, and guesses"
    count("draft_model_tokens", text, "source", lambda: {n: w.tokens for n, w in works.items()})
    text, watch = "Part of kv_memory that its KV has", metrics.watch_each
    watch("draft_kv_bytes", text, "source", lambda: {n: w.kv[0] for n, w in works.items()})
    text = "Of these, in use"
    watch("draft_kv_used_bytes", text, "source", lambda: {n: w.kv[1] for n, w in works.items()})


def watch_draft_texts(metrics: NodeMetrics, texts: Sequence[Texts]) -> None:
    """Memory of the texts in which drafts are looked for."""
    metrics.watch_each(
        "draft_texts_bytes",
        "Memory of texts in which drafts are looked for",
        "source",
        lambda: {source.name: source.num_bytes for source in texts},
    )


def watch_perf(metrics: NodeMetrics, perf: PerfModel) -> None:
    """Accuracy of the performance model; steps with prompt chunks count as prefill steps."""
    watch = metrics.watch
    ratio, error = "Actual / profiled time of", "Moving average of |predicted / actual - 1| of"
    watch("perf_prefill_ratio", f"{ratio} prefill steps", lambda: perf.prefill_ratio)
    watch("perf_decode_ratio", f"{ratio} decode steps", lambda: perf.decode_ratio)
    watch("perf_prefill_error", f"{error} prefill steps", lambda: perf.prefill_error)
    watch("perf_decode_error", f"{error} decode steps", lambda: perf.decode_error)


def watch_transfers(
    metrics: NodeMetrics, exported: ExporterStatistics, pulled: PullerStatistics
) -> None:
    """Both ends of the KV transfer."""
    count = metrics.count
    count("pulled_bytes", "KV bytes pulled", lambda: pulled.bytes)
    count("pulled_coded_bytes", "KV bytes pulled with a codec", lambda: pulled.coded_bytes)
    count("pulled_sent_bytes", "Bytes sent for pulls with a codec", lambda: pulled.sent_coded)
    count("pull_seconds", "Seconds spent in complete pulls", lambda: pulled.seconds)
    count("pulls", "Complete pulls", lambda: pulled.pulls)
    count("pulls_stale", "Pulls of blocks that were reused meanwhile", lambda: pulled.stale)
    count("pulls_timed_out", "Pulls that missed their deadline", lambda: pulled.timeouts)
    count("pulls_cancelled", "Pulls cancelled here", lambda: pulled.cancelled)
    count("pulls_failed", "Pulls whose exporter was lost or refused", lambda: pulled.failed)
    count("pulls_corrupt", "Pulls with wrong checksums", lambda: pulled.corrupt)
    count("pulls_retried", "Reads retried over the same transport", lambda: pulled.retried)
    count("pulls_replanned", "Reads retried over another transport", lambda: pulled.replanned)
    count("tickets_issued", "Tickets issued", lambda: exported.tickets_issued)
    count("pools_shared", "Pullers given access to the memory", lambda: exported.pools_shared)
    count("exports", "Pulls served here, complete and valid", lambda: exported.pulls_served)
    count("exported_bytes", "KV bytes sent to pullers", lambda: exported.bytes_sent)
    count("exports_stale", "Pulls served of blocks that were reused", lambda: exported.stale)
    count("exports_refused", "Tickets, access tokens or hellos refused", lambda: exported.refused)
    count("exports_broken", "Pulls whose puller disconnected or stalled", lambda: exported.broken)
    count("transport_garbage", "Connections that broke the protocol", lambda: exported.garbage)
    count("transport_turned_away", "Connections over the limit", lambda: exported.turned_away)


def watch_prefix_fetches(metrics: NodeMetrics, fetched: PrefixFetchStatistics) -> None:
    """Prefixes that were fetched instead of computed."""
    count = metrics.count
    count("prefix_tokens", "Prompt tokens fetched from other nodes", lambda: fetched.tokens)
    count("prefix_bytes", "KV bytes of prefixes fetched from other nodes", lambda: fetched.bytes)
    count("prefix_tier_tokens", "Prompt tokens from the host tier", lambda: fetched.tier_tokens)
    count("prefix_store_tokens", "Prompt tokens from the store", lambda: fetched.store_tokens)
    count("prefix_declined", "Prefixes faster to compute than to fetch", lambda: fetched.declined)
    count("prefix_crowded", "Prefixes for which there was no room", lambda: fetched.crowded)
    count("prefix_failed", "Sources of prefixes that failed", lambda: fetched.failed)
    count("prefix_replanned", "Sources tried after a failed one", lambda: fetched.replanned)
    count("prefix_timed_out", "Fetches of prefixes that took too long", lambda: fetched.timed_out)


def watch_prefix_exports(metrics: NodeMetrics, exports: PrefixExports) -> None:
    """Prefixes that other nodes fetch from here."""
    count, asked = metrics.count, exports.statistics
    metrics.watch(
        "prefix_held_blocks", "KV blocks held for queries", lambda: exports.num_held_blocks
    )
    count("prefix_queries", "Queries for prefix blocks", lambda: asked.queries)
    count("prefix_exported_blocks", "Prefix blocks ticketed for others", lambda: asked.blocks)
    count("prefix_curbed", "Queries given fewer blocks than there were", lambda: asked.curbed)
    count("prefix_expired", "Queries that were not settled in time", lambda: asked.expired)


def watch_tier(metrics: NodeMetrics, tier: HostTier) -> None:
    """The host tier."""
    count, moved = metrics.count, tier.statistics
    metrics.watch("tier_blocks", "Capacity of the host tier, blocks", lambda: tier.num_blocks)
    metrics.watch("tier_held_blocks", "KV blocks in the host tier", lambda: tier.num_held)
    count("tier_stored", "KV blocks copied to the host tier", lambda: moved.stored)
    count("tier_loaded", "KV blocks copied back from it", lambda: moved.loaded)
    count("tier_evicted", "KV blocks evicted from it", lambda: moved.evicted)
    count("tier_stale", "Loads of blocks that were evicted in the meantime", lambda: moved.stale)
    count("tier_corrupt", "Loads of other bytes than were stored", lambda: moved.corrupt)
    count("tier_bytes", "KV bytes copied to and from it", lambda: moved.bytes)


def watch_store(metrics: NodeMetrics, store: NodeStore) -> None:
    """The prefix store."""
    count, seen = metrics.count, store.statistics
    metrics.watch("store_bytes", "Bytes in the prefix store, all nodes'", lambda: store.num_bytes)
    metrics.watch("store_known_blocks", "KV blocks to be read there", lambda: len(store.index))
    metrics.watch("store_closed", "1 while it is too slow to ask", lambda: store.breaker.is_open)
    count("store_written", "KV blocks written to the prefix store", lambda: seen.written)
    count("store_read", "KV blocks read from it", lambda: seen.read)
    count("store_missed", "KV blocks gone before they were written", lambda: seen.missed)
    count("store_declined", "KV blocks sooner computed than read", lambda: seen.declined)
    count("store_missing", "KV blocks that others had removed", lambda: seen.missing)
    count("store_corrupt", "KV blocks that it had other bytes of", lambda: seen.corrupt)
    count("store_evicted", "KV blocks removed from it as too much", lambda: seen.evicted)
    count("store_slow", "Prompts that waited for it in vain", lambda: seen.slow)
    count("store_failed", "Reads, writes and surveys that failed", lambda: seen.failed)
    count("store_moved_bytes", "KV bytes to and from it", lambda: seen.bytes)


def observe_step(metrics: NodeMetrics, report: StepReport) -> None:
    """Record one step in the histograms."""
    metrics.steps.inc()
    metrics.step_time.observe(report.model_s)
    metrics.step_overhead.observe(report.overhead_s)
    metrics.batch_requests.observe(len(report.rows))
    metrics.batch_tokens.observe(sum(row.num_tokens for row in report.rows))
