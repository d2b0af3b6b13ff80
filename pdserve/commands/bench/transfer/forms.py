"""Pulls of a prompt's KV over a simulated network, in each form in which it may be sent.

Exporter and puller are in this process, so the coding of both takes time from it. Links choose
among raw and coded as they do in nodes, by what they have measured: the first pulls teach them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.links.sharded_link import AnyLink
from kv_transfer.memory import ExportedPool
from kv_transfer.puller import Puller
from kv_transfer.transports.catalog import KINDS
from pdserve import _native
from pdserve.kv import KvDtype, KvLayout
from pdserve.protocol import ExporterWelcome
from pdserve.shared.clock import SystemClock
from pdserve.shared.errors import CorruptTransfer
from pdserve.shared.simulated_link import SimulatedLink

PROMPT_TOKENS: Final = 4096
# As of a model of 160M parameters.
LAYOUT: Final = KvLayout.gqa(layers=12, heads=4, head_dim=64, block_size=16, dtype=KvDtype.BFLOAT16)
RAW_FORM: Final = "raw"
# What each form is named, and what rows are rounded to for it.
FORMS: Final[Mapping[str, KvDtype | None]] = MappingProxyType(
    {RAW_FORM: None, "lossless": None, "int8": KvDtype.INT8, "fp8": KvDtype.FP8}
)
_LEARNING: Final = 4  # pulls, in which a link tries each of the ways that it has
_MEASURED: Final = 3
_TIMEOUT_S: Final = 600.0
_SCALE_BYTES: Final = 4
_DISTINCT_ROWS: Final = 1 << 14  # more bytes than what a codec looks at together


class FormRow(msgspec.Struct, frozen=True):
    """Pulls of one form; medians."""

    form: str
    sent_as: str  # what the link has chosen
    tokens: int
    kv_bytes: int
    sent_bytes: int
    pull_s: float
    raw_ratio: float  # time of the raw form to that of this one


class FormReport(msgspec.Struct, frozen=True):
    """The results of one run."""

    rows: list[FormRow]


async def measure_forms(link: SimulatedLink, num_tokens: int = PROMPT_TOKENS) -> list[FormRow]:
    """Measure each form.

    Raises:
        CorruptTransfer: what arrived is not what was sent.
    """
    rows: list[FormRow] = []
    for form, codes in FORMS.items():
        layout = msgspec.structs.replace(LAYOUT, rounded_to=codes)
        async with _opened(form, layout, link, num_tokens) as pair:
            for _ in range(0 if form == RAW_FORM else _LEARNING):
                await pair.pull()
            times, sent = zip(*[await pair.pull() for _ in range(_MEASURED)], strict=True)
            pull_s = median(times)
            raw_s = rows[0].pull_s if rows else pull_s
            kv_bytes = num_tokens * layout.token_bytes
            row = FormRow(
                form, pair.link.codec, num_tokens, kv_bytes, median(sent), pull_s, raw_s / pull_s
            )
            rows.append(row)
    return rows


def table_of(rows: list[FormRow], link: SimulatedLink) -> Table:
    """As it is printed."""
    speed = f"{link.bytes_per_s * 8 / 1e9:g} Gb/s, {link.delay * 1e3:g} ms one way"
    table = Table(title=f"KV of {rows[0].tokens} tokens over a simulated link of {speed}")
    table.add_column("form")
    table.add_column("sent as")
    for column in ("MB sent", "of raw", "s a pull", "raw / this"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.form,
            row.sent_as,
            f"{row.sent_bytes / 1e6:.1f}",
            f"{row.sent_bytes / row.kv_bytes:.2f}",
            f"{row.pull_s:.3f}",
            f"{row.raw_ratio:.2f}",
        )
    return table


@dataclass(frozen=True, slots=True)
class _Pair:
    exporter: Exporter
    puller: Puller
    link: AnyLink
    num_tokens: int
    source: ExportedPool
    destination: ExportedPool

    async def pull(self) -> tuple[float, int]:
        """Pull the prompt's KV: (seconds, bytes sent)."""
        blocks = list(range(self.source.num_blocks))
        ticket = self.exporter.issue("benchmark", 0, self.num_tokens, blocks)
        self.destination.data[:] = 0
        sent, started_s = self.exporter.statistics.bytes_sent, time.perf_counter()
        await self.puller.pull(self.link, ticket, blocks, 0, _TIMEOUT_S)
        seconds = time.perf_counter() - started_s
        if not np.array_equal(self.destination.data, self.source.data):
            raise CorruptTransfer("what arrived is not what was sent")
        return seconds, self.exporter.statistics.bytes_sent - sent


@asynccontextmanager
async def _opened(
    form: str, layout: KvLayout, link: SimulatedLink, num_tokens: int
) -> AsyncIterator[_Pair]:
    """An exporter of a prompt's KV, and a puller."""
    async with AsyncExitStack() as stack:
        num_blocks = layout.blocks_for(num_tokens)
        pools = [ExportedPool(num_blocks, layout.block_bytes) for _ in range(2)]
        for pool in pools:
            stack.callback(pool.close)
        source, destination = pools
        source.flat[:] = _content(layout, len(source.flat))
        identity = KvIdentity("benchmark", "", layout)
        kinds = [kind for kind in KINDS if kind.name == "tcp"]
        exporter = Exporter("exporter", form, identity, source, SystemClock(), kinds)
        stack.push_async_callback(exporter.close)
        await exporter.start("127.0.0.1")
        puller = Puller(destination, identity, host_id(), kinds, simulated=lambda _: link)
        stack.push_async_callback(puller.close)
        opened = await puller.connect(_welcome(exporter, form), _TIMEOUT_S)
        stack.push_async_callback(opened.close)
        yield _Pair(exporter, puller, opened, num_tokens, source, destination)


def _welcome(exporter: Exporter, form: str) -> ExporterWelcome:
    """Of an exporter that has no codecs, for the raw form."""
    welcome = exporter.welcome()
    if form != RAW_FORM:
        return welcome
    offers = [msgspec.structs.replace(offer, codecs=[]) for offer in welcome.offers]
    return msgspec.structs.replace(welcome, offers=offers)


def _content(layout: KvLayout, num_bytes: int) -> NDArray[np.uint8]:
    """Normally distributed numbers, as keys and values nearly are, rounded as the layout says."""
    numbers = np.random.default_rng(0).standard_normal(num_bytes // 2, dtype=np.float32)
    content = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    if layout.rounded_to is None:
        return content
    shape = (layout.head_dim, True, str(layout.rounded_to))
    rows = content.reshape(-1, 2 * layout.head_dim)
    coded = np.empty(layout.head_dim + _SCALE_BYTES, dtype=np.uint8)
    for row in rows[:_DISTINCT_ROWS]:
        _native.code_rows(row, coded, *shape)  # one by one: it stops where a row is not rounded yet
        _native.decode_rows(coded, row, *shape)
    for begin in range(_DISTINCT_ROWS, len(rows), _DISTINCT_ROWS):
        rows[begin : begin + _DISTINCT_ROWS] = rows[: min(_DISTINCT_ROWS, len(rows) - begin)]
    return content
