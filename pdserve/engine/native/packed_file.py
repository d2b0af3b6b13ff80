"""A file of named arrays, mapped and shared by every process of a host that reads it.

    preamble, one page: magic, format, is_synced, boot id, location of the index, digest
    arrays: their bytes, each starting on a new page
    index: JSON with the identity of the weights, and the location of each array

The file is used as soon as it is written, without waiting for the disk. Until it has been synced,
it is valid only during the boot in which it was written, since a crash may lose unwritten pages.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pdserve.engine.native.huge_writes import HugeWriter
from pdserve.engine.native.packed_pages import map_pages

log = logging.getLogger(__name__)

FORMAT = 2  # of the file, and of the packed matrices in it; from 2 on, all values are finite
PAGE_BYTES = 4096
CODES_FORMAT = 3  # of matrices of codes and int8: from 3 on, in the order of their reading
_MAGIC = b"PDSPACK\n"
# magic, format, is_synced, boot, offset and size of the index, digest of index and its offset
_PREAMBLE = struct.Struct("<8sII16sQQ32s")
_SYNCED_AT, _SYNCED = 12, struct.pack("<I", 1)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Array(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    offset: int


class _Index(msgspec.Struct, frozen=True):
    identity: str
    arrays: dict[str, _Array]


class UnusableFile(Exception):
    """A packed file that must be written again; the message says why."""


def write_packed_file(path: Path, identity: str, arrays: Iterable[tuple[str, Tensor]]) -> None:
    """Write a file under a temporary name, then rename it, so that it appears atomically.

    Args:
        path: of the file; an existing file is replaced.
        identity: a reader must pass the same.
        arrays: contiguous, on the CPU. Each is written before the next one is taken.

    Raises:
        OSError: no space or no permission; no file is left behind.
    """
    new = path.with_suffix(f".{os.getpid()}.new")
    try:
        with new.open("w+b", buffering=0) as file:
            _write(file.fileno(), identity, arrays)
            os.fchmod(file.fileno(), 0o444)  # cut while it is mapped, it would end all readers
            new.replace(path)
            synced = os.dup(file.fileno())
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    threading.Thread(target=_sync, args=(synced, path), name="packed-sync", daemon=True).start()


def read_packed_file(path: Path, identity: str) -> dict[str, Tensor]:
    """Return name |-> array, read-only, in pages that all readers of the file share.

    Raises:
        FileNotFoundError: the file does not exist.
        UnusableFile: it is damaged, incomplete, or has another identity.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        index = _read_index(file)
        if index.identity != identity:
            raise UnusableFile("it was made of something else")
        mapped = from_dlpack(map_pages(file.fileno()))
    return {name: _view(mapped, array) for name, array in index.arrays.items()}


def _write(fd: int, identity: str, arrays: Iterable[tuple[str, Tensor]]) -> None:
    placed: dict[str, _Array] = {}
    writer = HugeWriter(fd)
    writer.write(memoryview(bytes(PAGE_BYTES)))  # the preamble is filled in last
    for name, tensor in arrays:
        dtype = str(tensor.dtype).removeprefix("torch.")
        placed[name] = _Array(dtype, list(tensor.shape), writer.tell())
        writer.write(tensor.view(-1).view(torch.uint8).numpy().data)
        writer.pad(PAGE_BYTES)
    index = msgspec.json.encode(_Index(identity, placed))
    offset = writer.tell()
    writer.write(memoryview(index))
    writer.flush()
    digest = _digest(offset, index)
    os.pwrite(fd, _PREAMBLE.pack(_MAGIC, FORMAT, 0, _boot(), offset, len(index), digest), 0)


def _sync(fd: int, path: Path) -> None:
    """Sync the file to disk, then mark it as synced. Runs in a separate thread."""
    try:
        os.fsync(fd)
        os.pwrite(fd, _SYNCED, _SYNCED_AT)
    except OSError as error:
        log.warning("%s is good until the next boot only: %s", path, error)
    finally:
        os.close(fd)


def _read_index(file: BinaryIO) -> _Index:
    preamble = file.read(_PREAMBLE.size)
    if len(preamble) < _PREAMBLE.size:
        raise UnusableFile("it is too short")
    magic, version, is_synced, boot, offset, num_bytes, digest = _PREAMBLE.unpack(preamble)
    if (magic, version) != (_MAGIC, FORMAT):
        raise UnusableFile("it is of another format")
    if not is_synced and boot != _boot():
        raise UnusableFile("the machine went down before all of it was on the disk")
    if os.fstat(file.fileno()).st_size != offset + num_bytes:
        raise UnusableFile("its length is wrong")
    file.seek(offset)
    index = file.read(num_bytes)
    if _digest(offset, index) != digest:
        raise UnusableFile("its index is damaged")
    return msgspec.json.decode(index, type=_Index)


def _digest(offset: int, index: bytes) -> bytes:
    return hashlib.blake2b(struct.pack("<Q", offset) + index, digest_size=32).digest()


def _boot() -> bytes:
    return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))


def _view(mapped: Tensor, array: _Array) -> Tensor:
    dtype = getattr(torch, array.dtype)
    num_bytes = dtype.itemsize
    for size in array.shape:
        num_bytes *= size
    return mapped[array.offset : array.offset + num_bytes].view(dtype).view(array.shape)
