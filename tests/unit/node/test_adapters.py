"""Which adapters a node has, for whom, and when they leave."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdserve.node.adapters import NodeAdapters
from pdserve.node.legs import Legs
from pdserve.protocol import AdapterLoaded, AdapterReport, LoadAdapter
from pdserve.shared.errors import AdapterNotLoaded, AdapterRefused, ItemNotFound
from tests.fakes.outbox import RecordingOutbox
from tests.waits import until


@dataclass(frozen=True)
class Files:
    digest: str
    num_bytes: int = 10
    invocation: tuple[int, ...] = ()


@dataclass
class Store:
    """An adapter in each folder, whose digest is in its name."""

    loaded: list[str] = field(default_factory=list)
    refuses: bool = False

    def load(self, path: Path) -> Files:
        if self.refuses:
            raise AdapterRefused("rank 0")
        if not path.is_dir():
            raise ItemNotFound("there is no folder", "lora_path")
        self.loaded.append(path.name)
        return Files(path.name)

    def unload(self, digest: str) -> None:
        self.loaded.remove(digest)


class Node:
    """A node's adapters over such a store."""

    def __init__(self, folder: Path, most: int = 2, most_bytes: int = 100) -> None:
        self.legs, self.store, self.link = Legs(), Store(), RecordingOutbox()
        self.steps = asyncio.Event()  # whether those under way are over
        self.steps.set()
        self.adapters = NodeAdapters(self.legs, most, most_bytes, self.steps.wait)
        self.adapters.begin(self.store)
        self._folder = folder

    async def load(
        self, name: str, digest: str = "", link: RecordingOutbox | None = None
    ) -> AdapterLoaded:
        link = link or self.link
        path = self._folder / name
        path.mkdir(exist_ok=True)
        link.sent.clear()
        self.adapters.load(LoadAdapter(order_id="1", path=str(path), digest=digest), link)
        await until(lambda: link.sent)
        (answer,) = link.sent
        assert isinstance(answer, AdapterLoaded)
        return answer

    def begin(self, leg: str, digest: str) -> None:
        self.adapters.use(digest)
        self.legs.open(leg, self.link, adapter=digest)

    @property
    def told(self) -> AdapterReport:
        return self.adapters.told()


@pytest.fixture
async def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_a_leg_whose_adapter_is_not_there_is_refused(node: Node) -> None:
    with pytest.raises(AdapterNotLoaded):
        node.adapters.use("a")
    assert (await node.load("a")).digest == "a"
    node.adapters.use("a")
    assert node.told == AdapterReport(digests=["a"], most=2)


async def test_what_cannot_be_loaded_is_told_and_leaves_nothing(node: Node, tmp_path: Path) -> None:
    node.store.refuses = True
    answer = await node.load("a")
    assert (answer.code, answer.message) == ("adapter_refused", "rank 0")
    node.store.refuses = False
    other = await node.load("a", digest="b")
    assert other.code == "adapter_refused"
    assert "not those that were loaded under this name" in other.message
    node.link.sent.clear()
    node.adapters.load(LoadAdapter(order_id="2", path=str(tmp_path / "no")), node.link)
    await until(lambda: node.link.sent)
    assert node.link.sent[0].code == "item_not_found"  # type: ignore[attr-defined]
    assert (node.store.loaded, node.told.digests) == ([], [])


async def test_it_leaves_when_nobody_wants_it_and_its_last_leg_has_ended(node: Node) -> None:
    other = RecordingOutbox()
    await node.load("a")
    await node.load("a", digest="a", link=other)
    node.begin("r", "a")
    node.adapters.unload("a", node.link)
    assert node.told.digests == ["a"]  # the other coordinator wants it
    node.adapters.unload("a", other)
    assert node.store.loaded == ["a"]
    node.steps.clear()
    node.legs.close("r")
    await until(lambda: node.told.digests == [])
    with pytest.raises(AdapterNotLoaded):
        node.adapters.use("a")
    assert node.store.loaded == ["a"]  # a step may still have a row of the leg
    node.steps.set()
    await until(lambda: node.store.loaded == [])


async def test_one_that_is_wanted_again_stays(node: Node) -> None:
    await node.load("a")
    node.begin("r", "a")
    node.adapters.unload("a", node.link)
    assert (await node.load("a", digest="a")).code == ""
    node.legs.close("r")
    await asyncio.sleep(0)
    assert node.told.digests == ["a"]


async def test_the_one_used_the_longest_ago_leaves_for_another(node: Node) -> None:
    await node.load("a")
    await node.load("b")
    node.begin("r", "a")
    node.legs.close("r")
    await node.load("c")
    assert (node.told.digests, sorted(node.store.loaded)) == (["a", "c"], ["a", "b", "c"])


async def test_one_that_lost_its_place_comes_back_unread_and_waits_for_no_step(node: Node) -> None:
    for name in "abc":
        await node.load(name)
    node.steps.clear()
    node.store.refuses = True  # as if the disk was gone
    assert (await node.load("a", digest="a")).code == ""
    assert node.told.digests == ["a", "c"]
    node.begin("r", "a")
    with pytest.raises(AdapterNotLoaded):
        node.adapters.use("b")


async def test_a_refusal_takes_no_place_away(node: Node) -> None:
    for name in "abc":
        await node.load(name)
    assert (await node.load("a", digest="z")).code == "adapter_refused"
    assert node.told.digests == ["b", "c"]


async def test_what_is_kept_leaves_when_it_is_unloaded_or_its_memory_is_needed(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, most=2, most_bytes=45)
    for name in "abcd":
        await node.load(name)
    node.steps.clear()
    node.adapters.unload("a", node.link)
    await asyncio.sleep(0)
    assert sorted(node.store.loaded) == ["a", "b", "c", "d"]  # a step may have it
    node.steps.set()
    await until(lambda: "a" not in node.store.loaded)
    await node.load("e")
    await node.load("f")
    assert sorted(node.store.loaded) == ["c", "d", "e", "f"]
    assert node.told.digests == ["e", "f"]


async def test_what_is_in_use_leaves_for_nobody(node: Node) -> None:
    await node.load("a")
    await node.load("b")
    node.begin("1", "a")
    node.begin("2", "b")
    answer = await node.load("c")
    assert (answer.code, node.told.digests) == ("adapters_full", ["a", "b"])
    assert "engine.max_adapters" in answer.message
    assert sorted(node.store.loaded) == ["a", "b"]


async def test_bytes_are_bounded_as_well(tmp_path: Path) -> None:
    node = Node(tmp_path, most=9, most_bytes=25)  # so none is kept
    for name in "abc":
        await node.load(name)
    assert node.told.digests == ["b", "c"]
    small = Node(tmp_path, most_bytes=5)
    answer = await small.load("a")
    assert answer.code == "adapter_refused"
    assert small.store.loaded == []


async def test_a_lost_coordinators_adapters_stay_until_their_places_are_needed(node: Node) -> None:
    await node.load("a")
    node.adapters.coordinator_lost(node.link)
    assert node.told.digests == ["a"]


async def test_a_lost_coordinator_does_not_want_what_was_kept_for_it(node: Node) -> None:
    lost = RecordingOutbox()
    await node.load("a", link=lost)
    for name in "bc":
        await node.load(name)
    node.adapters.coordinator_lost(lost)
    await node.load("a", digest="a")
    node.adapters.unload("a", node.link)
    await until(lambda: "a" not in node.store.loaded)
