"""Files of packed arrays: what is read back, and every way in which a file can be unusable."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.engine.native import packed_file
from pdserve.engine.native.packed_file import (
    PAGE_BYTES,
    UnusableFile,
    read_packed_file,
    write_packed_file,
)

ARRAYS = {
    "bytes": torch.arange(5000, dtype=torch.uint8),
    "half": torch.randn(7, 3).bfloat16(),
    "model.norm.weight": torch.randn(4),
    "nothing": torch.empty(0),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.packed"
    write_packed_file(path, "ours", ARRAYS.items())
    return path


def test_arrays_come_back_as_they_were_each_on_a_page_of_its_own(file: Path) -> None:
    arrays = read_packed_file(file, "ours")
    assert list(arrays) == list(ARRAYS)
    for name, array in arrays.items():
        assert array.dtype == ARRAYS[name].dtype
        assert torch.equal(array, ARRAYS[name])
        assert array.data_ptr() % PAGE_BYTES == 0 or array.numel() == 0


def test_readers_share_the_pages_and_cannot_write_to_them(file: Path) -> None:
    arrays = read_packed_file(file, "ours")
    address = arrays["bytes"].data_ptr()
    with open("/proc/self/maps") as maps:
        (mapping,) = [line for line in maps if _holds(line, address)]
    assert mapping.split()[1] == "r--s"
    assert mapping.rstrip().endswith(str(file))


def _holds(line: str, address: int) -> bool:
    start, end = (int(text, 16) for text in line.split()[0].split("-"))
    return start <= address < end


def test_the_mapping_outlives_the_file(file: Path) -> None:
    arrays = read_packed_file(file, "ours")
    file.unlink()
    assert torch.equal(arrays["bytes"], ARRAYS["bytes"])


def test_nobody_writes_to_the_file_by_mistake(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o444


def _cut(path: Path, num_bytes: int) -> None:
    path.chmod(0o600)
    os.truncate(path, num_bytes)


def _overwrite(path: Path, offset: int, text: bytes) -> None:
    path.chmod(0o600)
    with path.open("r+b") as stream:
        stream.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        stream.write(text)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda path: _cut(path, 0), "too short"),
        (lambda path: _cut(path, 3 * PAGE_BYTES), "length"),
        (lambda path: _cut(path, path.stat().st_size - 1), "length"),
        (lambda path: _overwrite(path, 0, b"GGUF"), "format"),
        (lambda path: _overwrite(path, 8, struct.pack("<I", packed_file.FORMAT + 1)), "format"),
        (lambda path: _overwrite(path, -3, b"!"), "index is damaged"),
    ],
)
def test_damage_is_noticed(
    file: Path, damage: Callable[[Path], None], complaint: str, wait_synced: Callable[[], None]
) -> None:
    wait_synced()
    damage(file)
    with pytest.raises(UnusableFile, match=complaint):
        read_packed_file(file, "ours")


def test_what_was_made_of_something_else_is_refused(file: Path) -> None:
    with pytest.raises(UnusableFile, match="something else"):
        read_packed_file(file, "theirs")


def test_a_crash_before_the_sync_makes_it_unusable(
    file: Path, wait_synced: Callable[[], None]
) -> None:
    wait_synced()
    _overwrite(file, packed_file._SYNCED_AT + 4, bytes(16))  # of another boot
    read_packed_file(file, "ours")  # it was synced
    _overwrite(file, packed_file._SYNCED_AT, struct.pack("<I", 0))
    with pytest.raises(UnusableFile, match="went down"):
        read_packed_file(file, "ours")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    def arrays() -> Iterator[tuple[str, Tensor]]:
        yield "first", ARRAYS["bytes"]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_packed_file(tmp_path / "weights.packed", "ours", arrays())
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_cannot_be_taken_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "weights.packed"
    path.mkdir()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(IsADirectoryError):
        write_packed_file(path, "ours", ARRAYS.items())
    assert os.listdir("/proc/self/fd") == before
    assert list(tmp_path.iterdir()) == [path]
