"""`pdserve bench router`: what a placement decision costs among very many simulated nodes.

Times are CPU times of this thread, so that other processes do not count.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, thread_time
from typing import get_args

import msgspec
from rich.console import Group
from rich.table import Table

from coordinator.generation import GenerationRequest
from coordinator.prefixes.index import PromptHashes
from coordinator.routing import Router
from pdserve.commands.bench.output import print_json, print_tables
from pdserve.commands.bench.router.config import RouterBenchConfig
from pdserve.commands.bench.router.made_up_nodes import BLOCK_SIZE, MadeUpNodes
from pdserve.protocol import Prompt
from pdserve.settings.config import Mode, RouterName
from pdserve.settings.values import SIDES_ROUTERS
from pdserve.shared.process.exit_codes import OK

KINDS: list[tuple[RouterName, Mode]] = [
    *((policy, "disaggregated") for policy in get_args(RouterName) if policy not in SIDES_ROUTERS),
    ("predicted", "colocated"),
    ("predicted", "adaptive"),
    *((policy, "adaptive") for policy in get_args(RouterName) if policy in SIDES_ROUTERS),
]

HIT_SHARES = (0.0, 0.5, 1.0)  # share of a prompt held by the nodes that hold most of it


class DecisionRow(msgspec.Struct, frozen=True):
    """Times of one kind of decision in microseconds, without hashing the prompt."""

    policy: RouterName
    mode: Mode
    prompt_tokens: int
    hit_share: float  # share of the prompt held by the nodes that hold most of it
    p50_us: float
    p99_us: float


class HashRow(msgspec.Struct, frozen=True):
    """Time to hash a whole prompt, which is done at most once per request."""

    prompt_tokens: int
    p50_us: float


class RouterBench(msgspec.Struct, frozen=True):
    """All results of `pdserve bench router`."""

    nodes: int
    nodes_per_host: int
    blocks: int
    index_bytes: int
    events_per_s: float  # stored or evicted blocks that the index applies
    bookings_us: float  # per request: dispatch, token 1, 64 more tokens, and the end
    hashing: list[HashRow]
    decisions: list[DecisionRow]


def measure_router(
    num_nodes: int,
    nodes_per_host: int,
    num_blocks: int,
    prompt_tokens: Sequence[int],
    decisions: int,
) -> RouterBench:
    """Fill a router's books and index, and time each kind of decision."""
    fleet = MadeUpNodes(num_nodes, nodes_per_host)
    prompts = {
        (num_tokens, share): fleet.tokens(num_tokens)
        for num_tokens in prompt_tokens
        for share in HIT_SHARES
    }
    filled = fleet.router("predicted", "disaggregated")
    index_bytes, events_per_s = _fill(filled, fleet, num_blocks, prompts)
    rows = []
    for policy, mode in KINDS:
        router = fleet.router(policy, mode)
        router.prefixes = filled.prefixes
        for (num_tokens, share), token_ids in prompts.items():
            decide = _decide(router, fleet.request("measured", token_ids))
            times_us = _time_us(decide, decisions)
            p99_us = quantiles(times_us, n=100)[-1]
            rows.append(DecisionRow(policy, mode, num_tokens, share, median(times_us), p99_us))
    return RouterBench(
        nodes=num_nodes,
        nodes_per_host=nodes_per_host,
        blocks=num_blocks,
        index_bytes=index_bytes,
        events_per_s=events_per_s,
        bookings_us=median(_time_us(_book(filled, fleet), decisions)),
        hashing=[_hash_row(fleet.tokens(num_tokens)) for num_tokens in prompt_tokens],
        decisions=rows,
    )


def _decide(router: Router, request: GenerationRequest) -> Callable[[], object]:
    hashes = PromptHashes(request.prompt)
    chain = hashes.chain(BLOCK_SIZE)
    chain.known(chain.num_blocks)
    return lambda: router.place_hashed(request, hashes)


def _book(router: Router, fleet: MadeUpNodes) -> Callable[[], None]:
    request = fleet.request("booked", fleet.tokens(1024))
    placement = router.place(request)

    def book() -> None:
        booking = router.dispatched(request, placement)
        for num_tokens in range(1, 66):
            booking.progressed(num_tokens)
        booking.end(by_itself=True)

    return book


def _fill(
    router: Router, fleet: MadeUpNodes, num_blocks: int, prompts: dict[tuple[int, float], list[int]]
) -> tuple[int, float]:
    """Fill the index with what members hold; return (index bytes, events per second)."""
    before = _resident_bytes()
    events = fleet.kv_events(num_blocks, prompts)
    num_events = sum(len(said.stored) for _, said in events)
    started_s = perf_counter()
    for member, said in events:
        router.prefixes.apply(member, said)
    seconds = perf_counter() - started_s
    del events  # only the hashes that the index holds remain
    gc.collect()
    return _resident_bytes() - before, num_events / seconds


def _hash_row(token_ids: list[int]) -> HashRow:
    times_us = _time_us(lambda: Prompt(token_ids).hashes(BLOCK_SIZE), 20)
    return HashRow(prompt_tokens=len(token_ids), p50_us=median(times_us))


def _time_us(do: Callable[[], object], times: int) -> list[float]:
    do()
    taken = []
    for _ in range(times):
        started_s = thread_time()
        do()
        taken.append((thread_time() - started_s) * 1e6)
    return taken


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def run(config: RouterBenchConfig, setup: dict[str, object]) -> int:
    """Measure and print; the exit code."""
    report = measure_router(
        config.nodes, config.nodes_per_host, config.blocks, config.prompt_tokens, config.decisions
    )
    if config.json:
        print_json(report, setup)
    else:
        print_tables([_render(report)])
    return OK


def _render(report: RouterBench) -> Group:
    table = Table(
        title=f"a decision among {report.nodes} nodes, {report.nodes_per_host} a host, "
        f"{report.blocks} cached blocks (microseconds)"
    )
    for column in ("router", "mode"):
        table.add_column(column)
    for column in ("prompt", "cached", "p50", "p99"):
        table.add_column(column, justify="right")
    for row in report.decisions:
        table.add_row(
            row.policy,
            row.mode,
            str(row.prompt_tokens),
            f"{row.hit_share:.0%}",
            f"{row.p50_us:.0f}",
            f"{row.p99_us:.0f}",
        )
    hashing = ", ".join(f"{row.prompt_tokens}: {row.p50_us:.0f}" for row in report.hashing)
    return Group(
        table,
        f"hashing a prompt, once a request (tokens: microseconds): {hashing}",
        f"index: {report.events_per_s:,.0f} blocks/s, {report.index_bytes / 2**20:.0f} MiB",
        f"books: {report.bookings_us:.0f} microseconds for a request of 65 tokens",
    )
