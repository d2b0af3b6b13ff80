"""A KV pool in memory that other processes can map, with one generation number per block.

    | block 0 | block 1 | ... | block n-1 | pad to a page | generations: uint64[num_blocks] |

The generations are a seqlock: the owner increments a block's generation before it reuses the block;
a reader copies the data first and reads the generation afterwards. If it equals the ticket's, the
data is valid.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pdserve import _native
from pdserve.shared.errors import PeerLost, StaleTicket
from pdserve.shared.process.shared_memory import SIZE_SEALS, sealed_memory

GENERATION_BYTES = 8
STALE: Final = -2  # native calls return it of blocks that were reused
_HUGE_PAGE = 2 << 20
_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; Python 3.11's fcntl has no name for it

# Only the owner, which has mapped the pool before the seal, can write to it.
POOL_SEALS = SIZE_SEALS | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE


MemoryKind = Literal["cpu", "cuda", "private"]  # private: not accessible to other processes


class KvPool(Protocol):
    """A KV pool that other nodes may pull from, on any device.

    Its generations are always in CPU memory that can be shared.
    """

    @property
    def kind(self) -> MemoryKind:
        """Where the blocks are."""
        ...

    @property
    def num_blocks(self) -> int:
        """Number of blocks; their ids are 0..num_blocks-1."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        ...

    @property
    def generations(self) -> NDArray[np.uint64]:
        """uint64[num_blocks]."""
        ...

    def bump(self, block_ids: Sequence[int]) -> None:
        """Make all tickets for these blocks stale; call it *before* they are reused.

        Raises:
            ValueError: an id is out of range; then no generation has changed.
        """
        ...

    def close(self) -> None:
        """Stop further processes from mapping the pool. Idempotent."""
        ...


def cpu_pool(pool: KvPool) -> ExportedPool:
    """The pool as an ExportedPool, for transports of CPU memory."""
    if not isinstance(pool, ExportedPool):
        raise TypeError(f"a transport for CPU memory was given a pool of {pool.kind} memory")
    return pool


class ExportedPool:
    """This process's KV pool: anonymous shared memory behind a file descriptor (a memfd).

    Pages are allocated when first touched, or by `commit`. Owns the descriptor and the mapping;
    arrays made from it keep the mapping alive after `close`.
    """

    kind: MemoryKind = "cpu"

    def __init__(self, num_blocks: int, block_bytes: int, *, is_sealed: bool = True) -> None:
        """Allocate a pool. Unless it `is_sealed`, other processes of this node may map it to write
        to it, until `seal` is called, which must be before it is exported.
        """
        if num_blocks <= 0 or block_bytes <= 0:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_bytes} bytes cannot be")
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        size = _generations_offset(num_blocks, block_bytes) + num_blocks * GENERATION_BYTES
        self.fd, self._mapping = sealed_memory(
            "pdserve-kv", size, POOL_SEALS if is_sealed else SIZE_SEALS
        )
        self.data, self.generations = _views(self._mapping, num_blocks, block_bytes)
        # All blocks as one writable array, uint8[num_blocks * block_bytes].
        self.flat: NDArray[np.uint8] = self.data.reshape(-1)

    def seal(self) -> None:
        """Let nobody map the pool for writing from now on. Idempotent."""
        if not fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, POOL_SEALS)

    def commit(self, first: int = 0, end: int | None = None) -> bool:
        """Allocate the memory of blocks first..end-1, or of all, in huge pages if possible.

        Returns whether the kernel supports huge pages for shared memory; the memory is allocated in
        any case. With huge pages, scattered blocks are read up to 50 % faster, and the kernel
        copies between processes (UCX without RDMA) twice as fast. Takes about a second per GiB, on
        any thread; the blocks may be in use meanwhile.

        Raises:
            OSError: there is not enough memory.
        """
        start = first * self.block_bytes // _HUGE_PAGE * _HUGE_PAGE
        stop = None if end is None else -(-end * self.block_bytes // _HUGE_PAGE) * _HUGE_PAGE
        return _native.commit_huge_pages(self._mapping[start:stop])

    def commit_within(self, first: int, end: int) -> None:
        """Allocate the huge pages that lie within blocks first..end-1, if there are any.

        Raises:
            OSError: there is not enough memory.
        """
        start = -(-first * self.block_bytes // _HUGE_PAGE) * _HUGE_PAGE
        stop = end * self.block_bytes // _HUGE_PAGE * _HUGE_PAGE
        if start < stop:
            _native.commit_huge_pages(self._mapping[start:stop])

    def free_blocks(self, first: int, end: int) -> None:
        """Give the memory of blocks first..end-1 back to the system, if the pool is not sealed.

        Their tickets must be stale. They have memory again, and zeroes in it, once touched.
        """
        _native.free_pages(self.data[first:end].reshape(-1))

    def bump(self, block_ids: Sequence[int]) -> None:
        """Make all tickets for these blocks stale; call it *before* they are reused."""
        _native.bump_generations(self.generations, np.asarray(block_ids, dtype=np.int64))

    def close(self) -> None:
        """Close the descriptor: no further process can map the pool."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class RemotePool:
    """Another process's pool, mapped read-only. Its owner can die or misbehave without harm.

    Takes ownership of `fd` and closes it, even if it raises. The mapping lasts as long as the
    arrays.

    Raises:
        PeerLost: the descriptor is not a pool of that many blocks of that size.
    """

    def __init__(self, fd: int, num_blocks: int, block_bytes: int) -> None:
        size = _generations_offset(num_blocks, block_bytes) + num_blocks * GENERATION_BYTES
        mapping = map_sealed(fd, size)
        data, self.generations = _views(mapping, num_blocks, block_bytes)
        self.flat = data.reshape(-1)  # uint8[num_blocks * block_bytes], not writable


def map_own_pool(
    fd: int, num_blocks: int, block_bytes: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """Map the pool of this process's node, before it is sealed, to write to it.

    Returns:
        Data, uint8[num_blocks, block_bytes], and generations, uint64[num_blocks].
    """
    size = _generations_offset(num_blocks, block_bytes) + num_blocks * GENERATION_BYTES
    return _views(_native.map_shared(fd, size, writable=True), num_blocks, block_bytes)


def map_sealed(fd: int, size: int) -> NDArray[np.uint8]:
    """Map another process's sealed memory read-only. Closes `fd`, even if it raises.

    Raises:
        PeerLost: it is not sealed memory of that size.
    """
    try:
        found = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if found != size or not seals & fcntl.F_SEAL_SHRINK:
            raise PeerLost(
                f"expected a sealed pool of {size} bytes, received one of {found} bytes with "
                f"seals {seals:#x}"
            )
        return _native.map_shared(fd, size, writable=False)
    except (OSError, ValueError) as error:  # ValueError: empty, as announced
        raise PeerLost(f"the received descriptor cannot be mapped: {error}") from error
    finally:
        os.close(fd)


def _views(
    mapping: NDArray[np.uint8], num_blocks: int, block_bytes: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """(data [num_blocks, block_bytes], generations [num_blocks])."""
    data = mapping[: num_blocks * block_bytes].reshape(num_blocks, block_bytes)
    return data, mapping[_generations_offset(num_blocks, block_bytes) :].view(np.uint64)


def _generations_offset(num_blocks: int, block_bytes: int) -> int:
    return -(-num_blocks * block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def check_generations(
    generations: NDArray[np.uint64], block_ids: NDArray[np.int64], expected: NDArray[np.uint64]
) -> None:
    """Check that what was read from these blocks before this call is what the ticket names.

    Raises:
        StaleTicket: a block was reused; with its id and both generations.
        ValueError: an id is out of range.
    """
    index = _native.find_stale(generations, block_ids, expected)
    if index >= 0:
        block_id = int(block_ids[index])
        raise _stale(block_id, int(generations[block_id]), int(expected[index]))


def stale_of(
    generations: NDArray[np.uint64], block_ids: Sequence[int], expected: Sequence[int]
) -> StaleTicket:
    """The error of blocks of which at least one was reused while they were read."""
    for block_id, generation in zip(block_ids, expected, strict=True):
        if (now := int(generations[block_id])) != generation:
            return _stale(block_id, now, generation)
    raise AssertionError("generations only grow")


def check_read_generations(
    found: NDArray[np.uint64], block_ids: NDArray[np.int64], expected: NDArray[np.uint64]
) -> None:
    """As check_generations, given the generations `found[i]` that were read for `block_ids[i]`.

    Raises:
        StaleTicket: as check_generations.
    """
    differ = np.flatnonzero(found != expected)
    if len(differ):
        first = differ[0]
        raise _stale(int(block_ids[first]), int(found[first]), int(expected[first]))


def _stale(block_id: int, found: int, expected: int) -> StaleTicket:
    return StaleTicket(f"block {block_id} has generation {found}, the ticket is for {expected}")
