"""Between pool and prefix store: prefixes outlive their nodes, and a bad store costs nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kv_transfer.store.blobs import Blobs, FolderBlobs
from kv_transfer.store.entry import owner_name
from kv_transfer.store.erasure import erase
from kv_transfer.store.objects import blobs_at
from pdserve.node.prefixes.store import node_store
from pdserve.node.prefixes.store.node_store import STORE, NodeStore
from pdserve.node.prefixes.store.opening import check_store
from pdserve.settings.prefixes import PrefixConfig
from pdserve.shared.errors import ConfigError
from tests.fakes.gpus import FakeHost
from tests.full_disk import full_disk
from tests.object_server import BUCKET, s3_server
from tests.unit.node.prefixes.prefix_nodes import (
    PROMPT,
    PrefixNode,
    make_layout,
    started,
    steps_take,
)
from tests.waits import until

ACME = "4:acme:"
OTHER = list(range(500, 549))


class GatedBlobs(FolderBlobs):
    """A folder whose reads and writes wait for a gate, or fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = threading.Event()
        self.gate.set()
        self.is_broken = False
        self.num_reads = 0

    def read(self, name: str, into: NDArray[np.uint8]) -> bool:
        self.num_reads += 1
        self.pass_gate()
        return super().read(name, into)

    def write(self, name: str, data: NDArray[np.uint8]) -> None:
        self.pass_gate()
        super().write(name, data)

    def pass_gate(self) -> None:
        assert self.gate.wait(20)
        if self.is_broken:
            raise OSError("the server is gone")


@pytest.fixture
def blobs(tmp_path: Path) -> GatedBlobs:
    return GatedBlobs(tmp_path / "store")


@pytest.fixture(autouse=True)
def surveys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_store, "SURVEY_SHARE", 1)
    # A probe that has every reader makes prompts do without, and no test waits for its end.
    monkeypatch.setattr(node_store, "PROBES", (1, 4))


def make_node(blobs: Blobs, **options: Any) -> PrefixNode:
    return PrefixNode("n", tier_blocks=40, blobs=blobs, **options)


def store_of(node: PrefixNode) -> NodeStore:
    assert node.store is not None
    return node.store


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


async def until_written(node: PrefixNode, num_blocks: int = 12) -> None:
    await until(lambda: store_of(node).statistics.written >= num_blocks)


async def until_known(node: PrefixNode, num_blocks: int = 12) -> None:
    await until(lambda: len(store_of(node).index) >= num_blocks)


async def fill(
    blobs: Blobs, salt: str = "", prompt: Sequence[int] = PROMPT, revision: str = "r"
) -> None:
    """As a node that is no more has left it."""
    node = make_node(blobs, store_bytes=1 << 30, revision=revision)
    async with started(node):
        node.compute(prompt, salt=salt)
        await until_written(node)


@pytest.mark.parametrize("on_gpu", [False, True])
async def test_prefixes_outlive_their_nodes(blobs: GatedBlobs, on_gpu: bool) -> None:
    await fill(blobs)
    node = make_node(blobs, gpus=FakeHost() if on_gpu else None)
    async with started(node):
        await until_known(node)
        fetched = await node.fetcher.fetch(node.prefix(), [])
        assert node.num_cached_tokens() == 48
        assert (fetched.from_store, node.fetcher.statistics.store_tokens) == (48, 48)
        await node.fetcher.fetch(node.prefix(), [])
        assert store_of(node).statistics.read == 12


async def test_states_outlive_their_nodes(blobs: GatedBlobs) -> None:
    """A snapshot is in the store as what it is behind, and is its tenant's."""
    first = make_node(blobs, store_bytes=1 << 30, state_blocks=2)
    async with started(first):
        first.compute(PROMPT)
        first.keep_state(PROMPT[:32])
        await until_written(first, 14)
    node = make_node(blobs, state_blocks=2)
    async with started(node):
        await until_known(node, 14)
        fetched = await node.fetcher.fetch(node.prefix(), [])
        assert (node.num_usable_tokens(), fetched.from_store) == (32, 32)
        assert store_of(node).statistics.read == 10
    assert erase(blobs, "") == 14


@pytest.mark.long
async def test_prefixes_outlive_their_nodes_in_an_object_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("obstore", "moto"):
        pytest.importorskip(package, reason="an extra is not installed")
    with s3_server(monkeypatch) as server:
        blobs = blobs_at(f"s3://{BUCKET}/kv")
        await fill(blobs)
        server.most_bytes = 100  # what is read breaks off
        node = make_node(blobs, store_bytes=1 << 30)
        async with started(node):
            await until_known(node)
            await node.fetcher.fetch(node.prefix(), [])
            assert node.num_cached_tokens() == 0
            server.most_bytes = None
            await until(lambda: node.fetcher.could_fetch(node.prefix(), []))
            await node.fetcher.fetch(node.prefix(), [])
            assert node.num_cached_tokens() == 48
            assert erase(blobs, "") == 12


async def test_kv_of_other_weights_is_not_read(blobs: GatedBlobs) -> None:
    await fill(blobs)
    await fill(blobs, prompt=OTHER, revision="later")
    node = make_node(blobs, revision="later")
    async with started(node):
        await until_known(node)
        assert node.fetcher.could_fetch(node.prefix(OTHER), [])
        assert not node.fetcher.could_fetch(node.prefix(PROMPT), [])


async def test_a_node_that_waits_for_kv_of_another_does_not_read_it(blobs: GatedBlobs) -> None:
    await fill(blobs)
    node = make_node(blobs)
    async with started(node):
        await until_known(node)
        assert node.fetcher.could_fetch(node.prefix(), [])
        assert not node.fetcher.could_fetch(node.prefix(), [], is_here=True)
        await node.fetcher.fetch(node.prefix(), [], is_here=True)
        assert node.num_cached_tokens() == 0


async def test_no_flipped_bit_comes_into_the_pool(blobs: GatedBlobs, tmp_path: Path) -> None:
    await fill(blobs)
    files = files_in(tmp_path)
    assert len(files) == 12
    rng = np.random.default_rng(0)
    for number in range(96):  # eight in each, and more in some of them
        data = bytearray(files[number % 12].read_bytes())
        place = int(rng.integers(8 * len(data)))
        data[place // 8] ^= 1 << place % 8
        files[number % 12].write_bytes(data)
    node = make_node(blobs)
    store = store_of(node)
    async with started(node):
        await until(lambda: len(store.index) + store.statistics.corrupt == 12)
        for _ in range(12):
            await node.fetcher.fetch(node.prefix(), [])
        assert node.num_cached_tokens() == 0
        # Not all: what follows a damaged block of a prompt is useless.
        assert 0 < store.statistics.corrupt == 12 - len(store.index)
        await until(lambda: len(files_in(tmp_path)) == len(store.index))


async def test_what_somebody_removed_is_computed(blobs: GatedBlobs) -> None:
    await fill(blobs)
    node = make_node(blobs)
    async with started(node):
        await until_known(node)
        blobs.remove(store_of(node).index.key(node.prefix().hashes[5]).name)
        await node.fetcher.fetch(node.prefix(), [])
        assert node.num_cached_tokens() == 20
        assert store_of(node).statistics.missing == 1


async def test_a_store_that_hangs_is_waited_for_once_and_briefly(blobs: GatedBlobs) -> None:
    await fill(blobs)
    node = make_node(blobs, pull="auto")
    async with started(node):
        steps_take(node, 2.0)
        await until(lambda: node.parts.pull_costs.knows(STORE))
        blobs.gate.clear()
        loop, num_reads = asyncio.get_running_loop(), blobs.num_reads
        began_s = loop.time()
        await node.fetcher.fetch(node.prefix(), [])
        assert 0.03 < loop.time() - began_s < 1.0  # 2 % of 2 s, and what a busy machine adds
        assert store_of(node).statistics.slow == 1
        await until(lambda: blobs.num_reads > num_reads)
        for _ in range(3):
            assert not node.fetcher.could_fetch(node.prefix(), [])
        blobs.gate.set()
        await until(lambda: node.fetcher.could_fetch(node.prefix(), []))
        assert node.num_cached_tokens() == 0


async def test_a_slow_store_is_not_asked_for_what_is_computed_sooner(blobs: GatedBlobs) -> None:
    await fill(blobs)
    node = make_node(blobs, pull="auto")
    async with started(node):
        steps_take(node, 1e-4)
        await until(lambda: node.parts.pull_costs.knows(STORE))
        num_reads = blobs.num_reads
        await node.fetcher.fetch(node.prefix(), [])
        assert (node.num_cached_tokens(), blobs.num_reads) == (0, num_reads)
        assert node.fetcher.statistics.declined == 0  # the store says it itself
        node.compute(OTHER)
        await until(lambda: store_of(node).statistics.declined == 12)
        assert store_of(node).statistics.written == 0


async def test_a_store_that_fails_is_tried_again(blobs: GatedBlobs) -> None:
    await fill(blobs)
    node = make_node(blobs)
    async with started(node):
        await until_known(node)
        await until(lambda: node.parts.pull_costs.knows(STORE))
        blobs.is_broken = True
        await node.fetcher.fetch(node.prefix(), [])
        assert store_of(node).statistics.failed == 1
        assert not node.fetcher.could_fetch(node.prefix(), [])
        blobs.is_broken = False
        await until(lambda: node.fetcher.could_fetch(node.prefix(), []))
        await node.fetcher.fetch(node.prefix(), [])
        assert node.num_cached_tokens() == 48


async def test_a_full_disk_stops_writes_and_nothing_else(blobs: GatedBlobs) -> None:
    node = make_node(blobs)
    async with started(node):
        with full_disk():
            node.compute(PROMPT)
            await until(lambda: store_of(node).statistics.failed > 0)
        assert node.num_cached_tokens() == 48
        await until(lambda: store_of(node).num_first(node.prefix().hashes) == 0)
        node.compute(OTHER)
        await until_written(node, 1)


async def test_the_store_stays_within_its_bound(blobs: GatedBlobs) -> None:
    size = 8 * (make_layout().block_bytes + 100)
    node = make_node(blobs, store_bytes=size)
    async with started(node):
        for first in range(1000, 7000, 1000):
            before = store_of(node).statistics.written
            node.compute(range(first, first + 33))
            await until_written(node, before + 8)
        await until(lambda: sum(blob.num_bytes for blob in blobs.blobs()) <= size)
        assert store_of(node).statistics.evicted > 20


async def test_a_tenant_is_erased_for_good(blobs: GatedBlobs) -> None:
    node = make_node(blobs)
    async with started(node):
        node.compute(PROMPT, salt=ACME)
        node.compute(OTHER)
        await until_written(node, 24)
        assert erase(blobs, "acme") == 12
        # It is in the tier still, but is not written again once it comes back to the pool.
        node.flood()
        await node.fetcher.fetch(node.prefix(salt=ACME), [])
        node.compute(range(2000, 2049), salt=ACME)
        await until(lambda: owner_name("acme") in store_of(node).index.marks)
        written = store_of(node).statistics.written
        node.compute(range(3000, 3049), salt=ACME)
        await until_written(node, written + 12)
        acme = list(blobs.blobs(owner_name("acme")))
        hashes = {h.hex() for h in node.prefix(range(3000, 3049), salt=ACME).hashes}
        assert {blob.name.rpartition("/")[2] for blob in acme} == hashes
        assert sum(1 for _ in blobs.blobs(owner_name(""))) == 12


async def test_tenants_have_stores_of_their_own(blobs: GatedBlobs) -> None:
    await fill(blobs, salt=ACME)
    node = make_node(blobs)
    async with started(node):
        await until_known(node)
        assert node.fetcher.could_fetch(node.prefix(salt=ACME), [])
        assert not node.fetcher.could_fetch(node.prefix(salt="5:other:"), [])
        assert not node.fetcher.could_fetch(node.prefix(), [])


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_store .* cannot be used"):
        check_store(PrefixConfig(kv_store=str(tmp_path / "file" / "store")))
    check_store(PrefixConfig(kv_store=str(tmp_path / "new")))
    with pytest.raises(ConfigError, match="has no end: say kv_store_size"):
        check_store(PrefixConfig(kv_store="s3://bucket/kv"))
    with pytest.raises(ConfigError, match="cannot be written"):
        check_store(PrefixConfig(kv_store="https://example.org/kv", kv_store_size="1GiB"))


def test_a_folder_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(FolderBlobs, "open", lambda _: gate.wait(20))
    check_store(PrefixConfig(kv_store=str(tmp_path)), look_s=0.01)
    gate.set()
    assert "does not answer" in caplog.text
