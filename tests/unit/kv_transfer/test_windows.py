"""Of layers with windows, a handoff moves what the stream will see."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from msgspec.structs import replace

from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.puller import Puller
from pdserve.kv import need
from pdserve.shared.errors import CorruptTransfer
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
    link = await puller.connect(exporter.welcome(), 10)
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
