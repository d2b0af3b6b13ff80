"""A KV pool as memory that other processes can map, with one generation number per block.

    | block 0 | block 1 | ... | block n-1 | pad to a page | generations: uint64[num_blocks] |

The generations are a seqlock: the owner bumps a block's entry before the block gets new contents;
a reader copies the data first and looks at the generations after. Equal to the ticket's = valid.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdserve import _native
from pdserve.errors import PeerLost

_GENERATION_BYTES = 8
_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; Python 3.11's fcntl has no name for it

# Whoever maps the pool can rely on its size (touching a page beyond the end would kill it), and
# only we, who mapped it before the seal, can write to it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE


class ExportedPool:
    """This process's KV pool: shared memory that is anonymous and named by a file descriptor.

    Pages are allocated when first touched. Owns the descriptor and the mapping; arrays made of it
    keep the mapping alive beyond `close`.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        if num_blocks <= 0 or block_bytes <= 0:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_bytes} bytes cannot be")
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        size = _generations_offset(num_blocks, block_bytes) + num_blocks * _GENERATION_BYTES
        self.fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        mapping = mmap.mmap(self.fd, size)
        _use_huge_pages(mapping)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self.data, self.generations = _views(mapping, num_blocks, block_bytes)

    @property
    def flat(self) -> NDArray[np.uint8]:
        """The blocks as one region, uint8[num_blocks * block_bytes], writable."""
        return self.data.reshape(-1)

    def bump(self, block_ids: Sequence[int]) -> None:
        """Make every ticket for these blocks stale; call *before* they get new contents.

        Raises:
            ValueError: an id is out of range; then no generation has changed.
        """
        _native.bump_generations(self.generations, np.asarray(block_ids, dtype=np.int64))

    def close(self) -> None:
        """Close the descriptor: nobody new can map the pool. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class RemotePool:
    """Somebody else's pool, mapped read-only: its owner's death or mischief cannot hurt us.

    Takes ownership of `fd` and closes it, also when it raises. The mapping lasts as long as the
    arrays do.

    Raises:
        PeerLost: the descriptor is not an exported pool of that many blocks of that size.
    """

    def __init__(self, fd: int, num_blocks: int, block_bytes: int) -> None:
        try:
            mapping = _map_read_only(fd, num_blocks, block_bytes)
        finally:
            os.close(fd)
        data, self.generations = _views(mapping, num_blocks, block_bytes)
        self.flat = data.reshape(-1)  # uint8[num_blocks * block_bytes], not writable


def _map_read_only(fd: int, num_blocks: int, block_bytes: int) -> mmap.mmap:
    size = _generations_offset(num_blocks, block_bytes) + num_blocks * _GENERATION_BYTES
    try:
        found = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if found != size or not seals & fcntl.F_SEAL_SHRINK:
            raise PeerLost(
                f"expected a sealed pool of {size} bytes, received one of {found} bytes with "
                f"seals {seals:#x}"
            )
        mapping = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    except OSError as error:
        raise PeerLost(f"the received descriptor cannot be mapped: {error}") from error
    _use_huge_pages(mapping)
    return mapping


def _views(
    mapping: mmap.mmap, num_blocks: int, block_bytes: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """(data [num_blocks, block_bytes], generations [num_blocks])."""
    data = np.frombuffer(mapping, np.uint8, num_blocks * block_bytes)
    offset = _generations_offset(num_blocks, block_bytes)
    generations = np.frombuffer(mapping, np.uint64, num_blocks, offset)
    return data.reshape(num_blocks, block_bytes), generations


def _generations_offset(num_blocks: int, block_bytes: int) -> int:
    return -(-num_blocks * block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _use_huge_pages(mapping: mmap.mmap) -> None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return  # a kernel without them: slower, not wrong
