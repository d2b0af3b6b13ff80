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
    return Adapters(plan, taker)


def test_an_adapter_is_there_until_it_is_unloaded(
    adapters: Adapters, taker: Taker, folders: list[Path]
) -> None:
    digest = adapters.load(folders[0]).digest
    assert adapters.load(folders[0]).digest == digest, "the same again is the same"
    assert adapters.loaded() == taker.digests == [digest]
    adapters.unload(digest)
    assert adapters.loaded() == taker.digests == []
    with pytest.raises(AdapterNotLoaded, match="not loaded"):
        adapters.unload(digest)


def test_bytes_are_bounded(base: Path, taker: Taker, folders: list[Path]) -> None:
    plan = ModelPlan.of(load_model_config(resolve_checkpoint(str(base))))
    first = Adapters(plan, Taker()).load(folders[0])
    small = Adapters(plan, taker, max_bytes=first.num_bytes * 3 // 2)
    small.load(folders[0])
    with pytest.raises(CapacityError, match="bytes"):
        small.load(folders[1])
    assert small.loaded() == taker.digests == [first.digest]
    small.unload(first.digest)
    small.load(folders[1])


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
