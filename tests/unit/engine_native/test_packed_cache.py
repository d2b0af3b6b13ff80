"""The cache of packed weights: made once, waited for, bounded, and never in the way."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.engine.native.packed_cache import PackedCache, packed_arrays
from pdserve.engine.native.packed_folder import UNTOUCHED_S, packed_files
from pdserve.shared.errors import RequestCancelled
from tests.full_disk import full_disk

VALUES = torch.arange(3 * 4096, dtype=torch.uint8)


class Packer:
    """Counts how often it had to pack."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.num_times = 0
        self._before = before

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        self.num_times += 1
        self._before()
        yield "values", VALUES


def arrays_of(
    cache: PackedCache | None,
    packer: Packer,
    identity: str = "ours",
    while_waiting: Callable[[], None] = lambda: None,
) -> Tensor:
    arrays = packed_arrays(cache, "some/model-float32", identity, packer, while_waiting)
    assert torch.equal(arrays["values"], VALUES)
    return arrays["values"]


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    return PackedCache(tmp_path / "deep" / "weights", limit_bytes=1 << 30, wait_s=60.0)


def is_mapped(tensor: Tensor) -> bool:
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if ".packed" in line]
    return any(int(a, 16) <= tensor.data_ptr() < int(b, 16) for a, b in spans)


def test_the_first_start_packs_and_the_second_maps(cache: PackedCache) -> None:
    packer = Packer()
    first, second = arrays_of(cache, packer), arrays_of(cache, packer)
    assert packer.num_times == 1
    assert is_mapped(first)
    assert is_mapped(second)


def test_other_weights_have_a_file_of_their_own(cache: PackedCache) -> None:
    packer = Packer()
    arrays_of(cache, packer, "ours")
    arrays_of(cache, packer, "theirs")
    arrays_of(cache, packer, "ours")
    assert packer.num_times == 2
    assert len(packed_files(cache.folder)) == 2


def test_without_a_cache_they_are_packed_into_memory() -> None:
    assert not is_mapped(arrays_of(None, Packer()))


def test_a_damaged_file_is_packed_anew(
    cache: PackedCache, caplog: pytest.LogCaptureFixture
) -> None:
    packer = Packer()
    arrays_of(cache, packer)
    (file,) = packed_files(cache.folder)
    file.path.chmod(0o600)
    os.truncate(file.path, 100)
    assert is_mapped(arrays_of(cache, packer))
    assert packer.num_times == 2
    assert "packing anew" in caplog.text
    arrays_of(cache, packer)
    assert packer.num_times == 2


def test_a_full_disk_is_said_and_the_weights_are_in_memory(
    cache: PackedCache, caplog: pytest.LogCaptureFixture
) -> None:
    packer = Packer()
    with full_disk():
        assert not is_mapped(arrays_of(cache, packer))
    assert packer.num_times == 2
    assert "File too large" in caplog.text


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    cache = PackedCache(tmp_path / "file" / "weights", limit_bytes=1 << 30, wait_s=1.0)
    assert not is_mapped(arrays_of(cache, Packer()))
    assert "no other node shares" in caplog.text


def test_what_was_not_used_for_longest_makes_room(
    cache: PackedCache, wait_synced: Callable[[], None]
) -> None:
    for number, identity in enumerate("abc"):
        arrays_of(cache, Packer(), identity)
        wait_synced()  # which changes the file
        os.utime(packed_files(cache.folder)[-1].path, (number, number))
    arrays_of(cache, Packer(), "a")  # used just now
    size = packed_files(cache.folder)[0].num_bytes
    arrays_of(PackedCache(cache.folder, 2 * size, 1.0), Packer(), "d")
    packer = Packer()
    for identity in "ad":
        arrays_of(cache, packer, identity)
    assert packer.num_times == 0
    for identity in "bc":
        arrays_of(cache, packer, identity)
    assert packer.num_times == 2


def test_what_a_dead_packer_left_is_removed(cache: PackedCache) -> None:
    arrays_of(cache, Packer())
    (file,) = packed_files(cache.folder)
    file.path.rename(file.path.with_suffix(".4711.new"))
    arrays_of(cache, Packer())
    assert sorted(path.suffix for path in cache.folder.iterdir()) == [".lock", ".packed"]


def test_what_a_dead_packer_of_others_left_is_removed_in_time(cache: PackedCache) -> None:
    cache.folder.mkdir(parents=True)
    old, young = (cache.folder / f"other-{name}.1.new" for name in ("old", "young"))
    for file in (old, young):
        file.write_bytes(b"half")
    an_hour_ago = time.time() - UNTOUCHED_S - 1
    os.utime(old, (an_hour_ago, an_hour_ago))
    arrays_of(cache, Packer())
    assert not old.exists()
    assert young.exists()


def test_two_that_start_together_pack_once(cache: PackedCache) -> None:
    is_packing, may_pack = threading.Event(), threading.Event()

    def pack() -> None:
        is_packing.set()
        assert may_pack.wait(60)

    packer = Packer(pack)
    others = [threading.Thread(target=arrays_of, args=(cache, packer))]
    others[0].start()
    assert is_packing.wait(60)
    mapped: list[Tensor] = []
    others.append(
        threading.Thread(
            target=lambda: mapped.append(
                arrays_of(cache, packer, while_waiting=lambda: may_pack.set())
            )
        )
    )
    others[1].start()
    for thread in others:
        thread.join(60)
    assert packer.num_times == 1
    assert is_mapped(mapped[0])


@pytest.fixture
def held_lock(cache: PackedCache) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock of "ours" until its input ends."""
    arrays_of(cache, Packer())
    (file,) = packed_files(cache.folder)
    file.path.unlink()
    lock = file.path.with_suffix(".lock")
    program = f"import fcntl, sys; f = open({str(lock)!r}); fcntl.flock(f, fcntl.LOCK_EX); "
    program += "print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_after_the_deadline_a_node_packs_for_itself(
    cache: PackedCache, held_lock: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    impatient = PackedCache(cache.folder, cache.limit_bytes, wait_s=0.05)
    assert not is_mapped(arrays_of(impatient, Packer()))
    assert "another process has been packing" in caplog.text
    held_lock.kill()
    held_lock.wait()
    assert is_mapped(arrays_of(cache, Packer()))  # the lock was not left with who gave up


def test_a_packer_that_dies_leaves_the_work_to_who_waits(
    cache: PackedCache, held_lock: subprocess.Popen[bytes]
) -> None:
    packer = Packer()
    assert is_mapped(arrays_of(cache, packer, while_waiting=held_lock.kill))
    assert packer.num_times == 1


def test_who_is_not_wanted_any_more_stops_waiting(
    cache: PackedCache, held_lock: subprocess.Popen[bytes]
) -> None:
    def stop() -> None:
        raise RequestCancelled("stopped")

    with pytest.raises(RequestCancelled):
        arrays_of(cache, Packer(), while_waiting=stop)


def test_a_lock_that_the_disk_does_not_have(
    cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING):
        assert not is_mapped(arrays_of(cache, Packer()))
    assert "No locks available" in caplog.text
