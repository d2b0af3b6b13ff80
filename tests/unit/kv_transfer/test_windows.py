"""Of layers with windows, a handoff moves what the stream will see."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kv_transfer.exporter import Exporter, TicketRules
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.puller import Puller
from kv_transfer.transports.catalog import KINDS
from pdserve.kv import KvLayout, need
from pdserve.kv.companions import NONE, Companions
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import CorruptTransfer, StaleTicket
from tests.matrix import matrix
from tests.unit.kv_transfer.pairs import SMALL, make_exporter, make_pool, tokens_of

LAYOUT = replace(SMALL, num_layers=6)
WINDOWS = (8, 8, 8, 8, 8, None)  # as Gemma 3 has them
NUM_TOKENS = 62


@pytest.mark.parametrize("block_size", [4, 8])
async def test_a_handoff_moves_the_tails_of_layers_with_windows(block_size: int) -> None:
    ours = replace(LAYOUT, block_size=block_size)
    source, destination = make_pool(LAYOUT, 20, seed=1), make_pool(ours, 20)
    exporter, _ = make_exporter(source, LAYOUT, windows=WINDOWS)
    puller = Puller(destination, KvIdentity("a-model", "main", ours, windows=WINDOWS), host_id())
    await exporter.start("127.0.0.1")
    link = await puller.connect(exporter.welcome(), 30)
    table = list(range(need.blocks_for(NUM_TOKENS, 4)))
    own = list(range(1, 1 + need.blocks_for(NUM_TOKENS, block_size)))
    ticket = exporter.issue("r", 0, NUM_TOKENS, table)
    pulled = await puller.pull(link, ticket, own, 0, 10, num_tokens=NUM_TOKENS)
    first = need.window_block(NUM_TOKENS, 8, block_size) * block_size
    assert 0 < first <= NUM_TOKENS - 7
    sent = tokens_of(source, LAYOUT, table, 0, NUM_TOKENS)
    found = tokens_of(destination, ours, own, 0, NUM_TOKENS)
    assert (found[:, 5] == sent[:, 5]).all()
    assert (found[first:, :5] == sent[first:, :5]).all()
    assert not np.any(found[:first, :5])
    num_rows = NUM_TOKENS + 5 * (NUM_TOKENS - first)
    assert pulled.bytes == num_rows * LAYOUT.token_bytes // 6
    for token, layer, is_found in ((0, 0, False), (NUM_TOKENS - 2, 0, True), (0, 5, True)):
        rows = source.data[table[token // 4]].reshape(6, 2, SMALL.num_kv_heads, 4, -1)
        rows[layer, 1, 1, token % 4, 3] ^= 1
        with pytest.raises(CorruptTransfer) if is_found else nullcontext():
            await puller.pull(link, ticket, own, 0, 10, num_tokens=NUM_TOKENS)
        rows[layer, 1, 1, token % 4, 3] ^= 1
    await link.close()
    await puller.close()
    await exporter.close()


CUT = replace(LAYOUT, windows=(8, 8, 8, 8, 8, 0))  # one layer a block: each has five companions
PAIRED = replace(LAYOUT, windows=(8, 8, 0, 8, 8, 0))  # two layers a block, of which some are apart


def companions_of(
    layout: KvLayout, table: list[int], num_blocks: int, first_kept: int
) -> Companions:
    """Distinct ones for each block from an index of the table on; none for the others."""
    found = np.full((num_blocks, layout.num_companions), NONE, dtype=np.int32)
    spare = (block for block in range(num_blocks) if block not in table)
    for block in table[first_kept:]:
        found[block] = [next(spare) for _ in range(layout.num_companions)]
    return found


def rows_of(pool: Any, layout: KvLayout, companions: Companions | None, table: list[int]) -> Any:
    """[num_layers, tokens, ...] as `tokens_of`, layer by layer from wherever it is."""
    found = []
    for layer, place in enumerate(layout.places):
        one = replace(layout, num_layers=layout.block_layers, windows=())
        blocks = table
        if place.block:
            assert companions is not None
            blocks = [max(0, int(companions[block, place.block - 1])) for block in table]
        index = place.layer if layout.num_companions else layer
        found.append(tokens_of(pool, one, blocks, 0, NUM_TOKENS)[:, index])
    return np.stack(found)


def spoil(pool: Any, layout: KvLayout, companions: Companions, block: int, layer: int) -> None:
    """Change a byte of a layer, or change it back."""
    which, index = layout.places[layer]
    number = block if which == 0 else int(companions[block, which - 1])
    pool.data[number, index * layout.layer_bytes] ^= 1


@pytest.mark.parametrize("with_checksums", [False, True])
@pytest.mark.parametrize("transport", matrix(["shm", "tcp"], 1))
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(CUT, CUT), (CUT, LAYOUT), (LAYOUT, CUT), (PAIRED, PAIRED), (LAYOUT, PAIRED)],
)
@pytest.mark.parametrize("block_size", matrix([4, 8], 1))
async def test_pools_that_give_back_and_pools_that_keep_all_read_each_other(
    transport: str, ours: KvLayout, theirs: KvLayout, block_size: int, with_checksums: bool
) -> None:
    ours = replace(ours, block_size=block_size)
    first = need.window_block(NUM_TOKENS, 8, block_size)
    table = list(range(3, 3 + need.blocks_for(NUM_TOKENS, 4)))
    own = list(range(1, 1 + need.blocks_for(NUM_TOKENS, block_size)))
    source, destination = make_pool(theirs, 120, seed=1), make_pool(ours, 120)
    given = companions_of(theirs, table, 120, need.window_block(NUM_TOKENS, 8, 4))
    taken = companions_of(ours, own, 120, first)
    kinds = [kind for kind in KINDS if kind.name == transport]
    windows = tuple(w or None for w in ours.windows or theirs.windows)
    identity = KvIdentity("a-model", "main", theirs, windows=windows)
    exporter = Exporter(
        "prefill-0", "1", identity, source, ManualClock(), kinds,
        companions=given if theirs.num_companions else None,
        tickets=TicketRules(with_checksums=with_checksums),
    )  # fmt: skip
    puller = Puller(
        destination,
        KvIdentity("a-model", "main", ours, windows=windows),
        host_id(),
        kinds,
        companions=taken if ours.num_companions else None,
    )
    await exporter.start("127.0.0.1")
    link = await puller.connect(exporter.welcome(), 30)
    ticket = exporter.issue("r", 0, NUM_TOKENS, table)
    await puller.pull(link, ticket, own, 0, 10, num_tokens=NUM_TOKENS)
    assert puller.statistics.corrupt == 0
    sent = rows_of(source, theirs, given, table)
    found = rows_of(destination, ours, taken, own)
    begin = max(first * block_size, need.window_block(NUM_TOKENS, 8, 4) * 4)
    assert begin <= NUM_TOKENS - 7
    for layer, window in enumerate(windows):
        first_seen = begin if window else 0
        assert (found[layer, first_seen:] == sent[layer, first_seen:]).all()
    if with_checksums:  # a byte of a layer with a window, or of one without, is not as it was
        for layer in (5, 0):
            spoil(source, theirs, given, table[-2], layer)
            with pytest.raises(CorruptTransfer):
                await puller.pull(link, ticket, own, 0, 10, num_tokens=NUM_TOKENS)
            spoil(source, theirs, given, table[-2], layer)
    if theirs.num_companions:
        with pytest.raises(StaleTicket, match="given back"):
            await puller.pull(link, ticket, own, 0, 30)
        source.bump([int(given[table[-1], 0])])
        with pytest.raises(StaleTicket):
            await puller.pull(link, ticket, own, 0, 10, num_tokens=NUM_TOKENS)
    await link.close()
    await puller.close()
    await exporter.close()
