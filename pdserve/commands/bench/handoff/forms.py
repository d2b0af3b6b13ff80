"""Prompts over a slow network as clients see them, for each form in which KV may pass it.

For each form a cluster of its own gets the same prompts, one at a time, first as new ones. Their
token 1 comes from the prefill node, which waits for no KV; token 2 waits for what is not at the
decode node yet. Then the prefill node is started anew, which has no KV, and gets them once more. It
pulls what the decode node has kept, even if computing were faster, and token 1 waits for all of it.

Each time links learn from the first prompts, which do not count, what is worth its time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median
from typing import Final

import msgspec
from rich.table import Table

from pdserve.commands.bench.handoff.config import RAW, HandoffBenchConfig, WireForm
from pdserve.commands.bench.load.client import PLAIN_IDS
from pdserve.commands.bench.load.open_loop import OpenLoopClient, open_loop_client
from pdserve.commands.bench.load.outcome import Outcome
from pdserve.commands.bench.load.workload import TimedRequest
from pdserve.commands.bench.output import say
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.settings.config import HandoffConfig
from pdserve.settings.prefixes import PrefixConfig
from pdserve.settings.timeouts import Timeouts
from pdserve.shared.errors import ClusterError

LEARNING: Final = 4  # prompts
MEASURED: Final = 5
_OUTPUT_TOKENS: Final = 4
_PREFILL, _DECODE = "prefill-0", "decode-0"


class FormRow(msgspec.Struct, frozen=True):
    """Prompts by one form; medians, in milliseconds, of when a token came after the request."""

    form: str
    sent_as: str  # what the prefill node's link has chosen by the end
    new_1_ms: float
    new_2_ms: float
    known_1_ms: float
    # Times of the first form to those of this one.
    new_2_ratio: float
    known_1_ratio: float


class FormReport(msgspec.Struct, frozen=True):
    """The results of one run."""

    prompt_tokens: list[int]  # shortest, longest
    links: list[str]
    rows: list[FormRow]


async def measure_forms(config: HandoffBenchConfig) -> FormReport:
    """Measure each form that the config asks for.

    Raises:
        PdserveError: a cluster failed, or did not do what is to be measured.
    """
    rows: list[FormRow] = []
    for form in config.wire:
        new, known, sent_as = await _measure(config, form)
        new_1_ms, new_2_ms = _token_ms(new, 0), _token_ms(new, 1)
        known_1_ms = _token_ms(known, 0)
        first_2_ms, first_1_ms = (
            (rows[0].new_2_ms, rows[0].known_1_ms) if rows else (new_2_ms, known_1_ms)
        )
        rows.append(
            FormRow(
                form=form,
                sent_as=sent_as,
                new_1_ms=new_1_ms,
                new_2_ms=new_2_ms,
                known_1_ms=known_1_ms,
                new_2_ratio=first_2_ms / new_2_ms,
                known_1_ratio=first_1_ms / known_1_ms,
            )
        )
    return FormReport(list(config.prompt_range), config.links, rows)


def cluster_of(config: HandoffBenchConfig, form: WireForm) -> ClusterConfig:
    """The cluster whose KV goes over the links in this form."""
    links = [f"{link} {RAW}" for link in config.links] if form == RAW else config.links
    wire_dtype = form if form in ("int8", "fp8") else "auto"
    return ClusterConfig(
        port=0,
        transports=["tcp"],  # others have no codecs
        checkpoint=config.checkpoint,
        engine=msgspec.structs.replace(config.engine, wire_dtype=wire_dtype),
        handoff=HandoffConfig(links=links),
        prefix=PrefixConfig(prefix_pull="always"),  # also where computing would be faster
        timeouts=Timeouts(prefix_s=config.deadline_s),
    )


def table_of(report: FormReport) -> Table:
    """As it is printed."""
    shortest, longest = report.prompt_tokens
    first = report.rows[0].form
    table = Table(
        title=f"prompts of {shortest} to {longest} tokens, one at a time, over "
        f"{', '.join(report.links)} (ms after the request)"
    )
    for column in ("form", "sent as"):
        table.add_column(column)
    for column in (
        "new: token 1",
        "token 2",
        f"{first} / this",
        "known elsewhere: token 1",
        f"{first} / this",
    ):
        table.add_column(column, justify="right")
    for row in report.rows:
        table.add_row(
            row.form,
            row.sent_as,
            f"{row.new_1_ms:.0f}",
            f"{row.new_2_ms:.0f}",
            f"{row.new_2_ratio:.2f}",
            f"{row.known_1_ms:.0f}",
            f"{row.known_1_ratio:.2f}",
        )
    return table


async def _measure(
    config: HandoffBenchConfig, form: WireForm
) -> tuple[list[Outcome], list[Outcome], str]:
    """Outcomes of new prompts and of known ones, and how KV was sent to the prefill node."""
    requests = _requests(config)
    async with Cluster(cluster_of(config, form)) as running:
        if running.warning:
            say(running.warning)
        model = (await running.status()).model
        async with open_loop_client(running.url, model) as client:
            new = await _sent(client, requests, config.deadline_s)
            await running.kill_node(_PREFILL)
            await running.start_node(_PREFILL)
            known = await _sent(client, requests, config.deadline_s)
        status = await running.status()
    node = status.node(_PREFILL)
    sent_as = {link.peer: link.codec for link in node.links} if node is not None else {}
    if _DECODE not in sent_as:
        raise ClusterError(f"{_PREFILL} has not pulled the prompts that {_DECODE} had")
    return new, known, sent_as[_DECODE]


async def _sent(
    client: OpenLoopClient, requests: Sequence[TimedRequest], deadline_s: float
) -> list[Outcome]:
    """The outcomes that count."""
    return (await client.one_by_one(requests, "wire", deadline_s))[LEARNING:]


def _requests(config: HandoffBenchConfig) -> list[TimedRequest]:
    rng = random.Random(0)
    return [
        TimedRequest(
            0.0,
            "prompt",
            rng.choices(PLAIN_IDS, k=rng.randint(*config.prompt_range)),
            _OUTPUT_TOKENS,
        )
        for _ in range(LEARNING + MEASURED)
    ]


def _token_ms(outcomes: Sequence[Outcome], index: int) -> float:
    """Median time of a token."""
    return 1e3 * median(outcome.arrivals_s[index] - outcome.sent_s for outcome in outcomes)
