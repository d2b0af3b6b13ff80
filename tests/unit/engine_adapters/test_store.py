"""The adapters of a node: all or nothing, and none leaves while it is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.adapters.store import Adapters
from pdserve.engine.models.config import load_model_config
from pdserve.engine.plan.model import ModelPlan
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.shared.errors import AdapterNotLoaded, AdapterRefused, CapacityError
from tests.adapters import edit_adapter, make_adapter
from tests.checkpoints import make_checkpoint


class Taker:
    """Notes which adapters a decoder would have."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.refuses = False

    def take_adapter(self, adapter: Adapter) -> None:
        if self.refuses:
            raise AdapterRefused("not here")
        self.digests.append(adapter.digest)

    def drop_adapter(self, digest: str) -> None:
        self.digests.remove(digest)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "base", "llama")


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("adapters")
    return [
        make_adapter(path / str(n), base, modules=("q_proj",), rank=2, seed=n) for n in range(3)
    ]


@pytest.fixture
def taker() -> Taker:
    return Taker()


@pytest.fixture
def adapters(base: Path, taker: Taker) -> Adapters:
    plan = ModelPlan.of(load_model_config(resolve_checkpoint(str(base))))
    return Adapters(plan, taker, max_adapters=2)


def test_an_adapter_leaves_with_its_last_request(
    adapters: Adapters, taker: Taker, folders: list[Path]
) -> None:
    digest = adapters.load(folders[0]).digest
    assert adapters.load(folders[0]).digest == digest, "the same again is the same"
    assert adapters.loaded() == taker.digests == [digest]
    adapters.hold(digest)
    adapters.hold(digest)
    adapters.unload(digest)
    assert adapters.loaded() == []
    with pytest.raises(AdapterNotLoaded, match="being unloaded"):
        adapters.hold(digest)
    adapters.release(digest)
    assert taker.digests == [digest]
    adapters.release(digest)
    assert taker.digests == []
    assert adapters.get(digest) is None
    with pytest.raises(AdapterNotLoaded, match="not loaded"):
        adapters.hold(digest)


def test_one_that_leaves_may_come_back(adapters: Adapters, folders: list[Path]) -> None:
    digest = adapters.load(folders[0]).digest
    adapters.hold(digest)
    adapters.unload(digest)
    adapters.load(folders[0])
    adapters.release(digest)
    assert adapters.loaded() == [digest]


def test_the_model_itself_is_always_there(adapters: Adapters) -> None:
    adapters.hold("")
    adapters.release("")
    assert adapters.loaded() == []


def test_number_and_bytes_are_bounded(
    base: Path, adapters: Adapters, taker: Taker, folders: list[Path]
) -> None:
    first = adapters.load(folders[0])
    adapters.load(folders[1])
    with pytest.raises(CapacityError, match="2 adapters are loaded"):
        adapters.load(folders[2])
    adapters.unload(first.digest)
    adapters.load(folders[2])
    plan = ModelPlan.of(load_model_config(resolve_checkpoint(str(base))))
    small = Adapters(plan, taker, max_bytes=first.num_bytes * 3 // 2)
    small.load(folders[0])
    with pytest.raises(CapacityError, match="bytes"):
        small.load(folders[1])
    assert small.loaded() == [first.digest]


def test_nothing_is_half_loaded(
    adapters: Adapters, taker: Taker, base: Path, tmp_path: Path
) -> None:
    damaged = make_adapter(tmp_path / "damaged", base)
    edit_adapter(damaged, r=3)
    with pytest.raises(AdapterRefused):
        adapters.load(damaged)
    edit_adapter(damaged, r=4)
    taker.refuses = True
    with pytest.raises(AdapterRefused, match="not here"):
        adapters.load(damaged)
    assert adapters.loaded() == taker.digests == []
