"""The prefix store as files: whole or not there, bounded, and without what was erased."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.tenants.identity import Tenant
from kv_transfer.store.blobs import Blob, FolderBlobs
from kv_transfer.store.entry import HEADER_BYTES, Key, check, owner_name, seal
from kv_transfer.store.erasure import erase, mark_of, marks
from kv_transfer.store.eviction import Content, stamp_of_use, victims
from pdserve.protocol import Prompt
from pdserve.shared.errors import CorruptTransfer
from tests.full_disk import full_disk

KIND = "ab" * 16
BLOCK_BYTES = 4096


def key(number: int, owner: str = "") -> Key:
    return Key(owner_name(owner), KIND, number.to_bytes(16))


def sealed(of: Key, seed: int = 0) -> NDArray[np.uint8]:
    entry = np.random.default_rng(seed).integers(0, 256, HEADER_BYTES + BLOCK_BYTES, dtype=np.uint8)
    seal(of, entry)
    return entry


@pytest.fixture
def blobs(tmp_path: Path) -> FolderBlobs:
    blobs = FolderBlobs(tmp_path / "store")
    blobs.open()
    return blobs


def test_what_is_read_is_what_was_written(blobs: FolderBlobs) -> None:
    written, found = sealed(key(1)), np.empty(HEADER_BYTES + BLOCK_BYTES, dtype=np.uint8)
    blobs.write(key(1).name, written)
    assert blobs.read(key(1).name, found)
    check(key(1), found)
    assert (found == written).all()
    assert not blobs.read(key(2).name, found)
    assert [Key.of(blob.name) for blob in blobs.blobs()] == [key(1)]
    blobs.remove(key(1).name)
    blobs.remove(key(1).name)
    assert list(blobs.blobs()) == []


def test_any_flipped_bit_is_found() -> None:
    rng = np.random.default_rng(1)
    entry = sealed(key(1))
    places = [*range(8 * HEADER_BYTES), *rng.integers(0, 8 * len(entry), 100).tolist()]
    for place in places:
        entry[place // 8] ^= 1 << place % 8
        with pytest.raises(CorruptTransfer):
            check(key(1), entry)
        entry[place // 8] ^= 1 << place % 8
    check(key(1), entry)


def test_a_block_is_not_taken_for_another() -> None:
    entry = sealed(key(1))
    for other in (key(2), Key(key(1).owner, "cd" * 16, key(1).block_hash)):
        with pytest.raises(CorruptTransfer):
            check(other, entry)


@pytest.mark.parametrize("change", [-1, 1])
def test_what_was_cut_off_is_found(blobs: FolderBlobs, change: int) -> None:
    entry = sealed(key(1))
    blobs.write(key(1).name, np.resize(entry, len(entry) + change))
    with pytest.raises(CorruptTransfer):
        blobs.read(key(1).name, entry)


def test_nothing_is_left_of_a_write_that_fails(blobs: FolderBlobs, tmp_path: Path) -> None:
    with full_disk(), pytest.raises(OSError, match="too large"):
        blobs.write(key(1).name, sealed(key(1)))
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_leftovers_of_crashed_writers_are_removed(blobs: FolderBlobs, tmp_path: Path) -> None:
    old, new = (tmp_path / "store" / ".parts" / name for name in ("old", "new"))
    for part in (old, new):
        part.write_bytes(b"part")
    os.utime(old, (time.time() - 7200,) * 2)
    assert list(blobs.blobs()) == []
    assert (old.exists(), new.exists()) == (False, True)


def content(**stamps: list[float]) -> Content:
    """Blocks of 10 bytes by their stamps, of each owner."""
    return Content.of(
        Blob(key(1000 * number + index, owner).name, 10, stamp)
        for number, (owner, each) in enumerate(stamps.items())
        for index, stamp in enumerate(each)
    )


def test_what_is_worth_least_leaves() -> None:
    full = content(a=[5.0, 1.0, 3.0, 2.0])
    assert victims(full, 40, 1000) == []
    assert [blob.stamp_s for blob in victims(full, 32, 1000)] == [1.0]
    assert [blob.stamp_s for blob in victims(full, 1000, 20)] == [1.0, 2.0]


def test_who_has_least_loses_nothing() -> None:
    full = content(big=[9.0] * 20, small=[1.0] * 3)
    leaving = victims(full, 160, 1000)
    assert {Key.of(blob.name).owner for blob in leaving} == {owner_name("big")}  # type: ignore[union-attr]
    assert sum(blob.num_bytes for blob in leaving) == 80  # 230 to 150


def test_what_was_read_stays_longer_than_what_was_written_later() -> None:
    now, reach = 1000.0, 400.0
    assert stamp_of_use(now, reach, 0) > stamp_of_use(now, reach, 1) > now + 90


def test_an_owner_is_erased_and_no_other(blobs: FolderBlobs) -> None:
    for number, owner in enumerate(["acme", "acme", "other", ""]):
        of = key(number, owner)
        blobs.write(of.name, sealed(of))
    assert erase(blobs, "acme") == 2
    assert {Key.of(blob.name) for blob in blobs.blobs()} - {None} == {key(2, "other"), key(3)}
    assert marks(blobs) == {owner_name("acme"): mark_of(blobs, owner_name("acme"))}
    assert mark_of(blobs, owner_name("other")) is None


def test_names_of_owners_are_names_of_files() -> None:
    names = {owner_name(owner) for owner in ("", "a", "a/b", "..", "x" * 300, "x" * 301, "é")}
    assert len(names) == 7
    assert all("/" not in name and name not in (".", "..") and len(name) < 200 for name in names)


@pytest.mark.parametrize(
    ("salt", "owner"),
    [
        ("", ""),
        ("mine", ""),
        ("4:acme:", "acme"),
        ("4:acme:a:b", "acme"),
        ("5:a:b.c:", "a:b.c"),
        ("9:acme:", ""),
        ("4:acmes", ""),
        ("x:acme:", ""),
        ("0:", ""),
        ("99999:a:", ""),
    ],
)
def test_salts_say_whose_prompts_are(salt: str, owner: str) -> None:
    assert Prompt([1], cache_salt=salt).owner == owner
    if owner:
        assert salt.startswith(Tenant(name="t", cache_group=owner).cache_salt(""))
