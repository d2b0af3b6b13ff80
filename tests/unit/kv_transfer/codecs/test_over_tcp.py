"""Pulls over a network for which a codec is worth its time, and exporters that have none."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kv_transfer.codecs.choice import Sending
from kv_transfer.spans.box import whole_box
from kv_transfer.transports.frames import CodedPullRequest, PullRequest
from kv_transfer.transports.interface import Read
from pdserve.kv import KvDtype, KvLayout
from pdserve.shared.errors import TransferError
from pdserve.shared.simulated_link import SimulatedLink
from tests.unit.kv_transfer.codecs.test_codecs import numbers
from tests.unit.kv_transfer.pairs import Pair, open_pair

LAYOUT = KvLayout.gqa(layers=4, heads=4, head_dim=64, block_size=16, dtype=KvDtype.BFLOAT16)
SLOW = SimulatedLink(bandwidth=8e6)  # far from what cores take, however busy they are


async def pull_all(pair: Pair, num_blocks: int) -> None:
    """Pull scattered blocks, and compare them."""
    rng = np.random.default_rng(num_blocks)
    source, target = (rng.permutation(num_blocks).tolist() for _ in range(2))
    pair.destination.data[:] = 0
    await pair.pull(pair.exporter.issue("r", 0, num_blocks * LAYOUT.block_size, source), target)
    assert np.array_equal(pair.destination.data[target], pair.source.data[source])


def fill(pair: Pair) -> None:
    values = numbers(pair.source.data.size // 2)
    pair.source.data[:] = values.reshape(pair.source.data.shape)


async def test_a_slow_network_brings_equal_bytes_by_fewer() -> None:
    async with open_pair("tcp", LAYOUT, num_blocks=34, simulated=SLOW) as pair:
        fill(pair)
        assert pair.link.codec == "raw"
        for _ in range(30):  # three, unless another process holds up one of them
            await pull_all(pair, 34)
            if pair.link.codec.startswith("zstd 1.4"):
                break
        else:
            pytest.fail("it is sent as it is")
        statistics = pair.puller.statistics
        assert 1.4 < statistics.coded_bytes / statistics.sent_coded < 1.6
        assert pair.exporter.statistics.bytes_sent < statistics.bytes


async def test_a_simulated_network_may_be_said_to_have_no_codec() -> None:
    raw = SimulatedLink(bandwidth=SLOW.bandwidth, is_raw=True)
    async with open_pair("tcp", LAYOUT, num_blocks=34, simulated=raw) as pair:
        fill(pair)
        for _ in range(3):
            await pull_all(pair, 34)
        assert (pair.link.codec, pair.puller.statistics.coded_bytes) == ("raw", 0)


async def test_an_exporter_from_before_codecs_is_asked_for_none() -> None:
    async with open_pair("tcp", LAYOUT, num_blocks=34, simulated=SLOW) as pair:
        fill(pair)
        welcome = pair.exporter.welcome()
        offers = [msgspec.structs.replace(offer, codecs=[]) for offer in welcome.offers]
        link = await pair.puller.connect(msgspec.structs.replace(welcome, offers=offers), 30)
        ticket = pair.exporter.issue("r", 0, 34 * LAYOUT.block_size, range(34))
        for _ in range(3):
            await pair.puller.pull(link, ticket, range(34), 0, 30)
        assert (link.codec, pair.puller.statistics.coded_bytes) == ("raw", 0)
        await link.close()


async def test_a_codec_that_the_exporter_does_not_have_is_refused_by_name() -> None:
    async with open_pair("coded", LAYOUT, num_blocks=4, codec="snappier") as pair:
        ticket = pair.exporter.issue("r", 0, LAYOUT.block_size, [1])
        with pytest.raises(TransferError, match="no codec 'snappier' here, but zstd"):
            await pair.pull(ticket, [1])
        assert pair.exporter.statistics.refused == 1


def test_a_request_without_a_codec_is_what_older_exporters_understand() -> None:
    box = whole_box(LAYOUT, 0, 16)
    nothing = np.empty((0, 3), dtype=np.int64)
    plain = Read(b"t", box, nothing[:, 0], nothing[:, 0], nothing, 0, None)  # type: ignore[arg-type]
    encoded = msgspec.msgpack.encode(PullRequest.of(plain))
    assert msgspec.msgpack.decode(encoded, type=PullRequest).box == box
    assert msgspec.msgpack.decode(encoded, type=CodedPullRequest).codec == ""
    coded = msgspec.structs.replace(plain, sending=Sending("zstd"))
    encoded = msgspec.msgpack.encode(PullRequest.of(coded))
    assert msgspec.msgpack.decode(encoded, type=CodedPullRequest).codec == "zstd"
