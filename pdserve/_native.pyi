"""Types and contracts of the native extension (csrc/). It borrows arrays for the length of a call.

Every function checks its arguments before it touches memory: TypeError for a wrong kind of array
(device, dtype, read-only where it is written), ValueError for shapes, strides and values; the
message names the argument, what was expected and what was found.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

def cpu_features() -> dict[str, bool]:
    """Instruction set extensions: avx2 (with FMA), avx512f (with BW, DQ, VL), avx512_bf16,
    avx512_vnni."""

def kernel_variants() -> list[str]:
    """The kernel builds this CPU can run, best first; the first is used."""

def num_threads() -> int:
    """How many threads share one kernel call; at first the cores this process may use."""

def set_num_threads(num_threads: int) -> None:
    """Set how many threads share one kernel call, the caller included (1 to 1024).

    Waits for a running kernel call to end. A forked child starts with the default again.
    """

def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim] float32 or bfloat16, strided but the last
    kv_pool: Tensor,  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    layer: int,
    query_start: Tensor,  # [num_requests + 1] int32, cumulative rows of query
    context_lens: Tensor,  # [num_requests] int32, KV tokens including the request's own rows
    block_tables: Tensor,  # [num_requests, max_blocks] int32
    scale: float,
    sliding_window: int,  # tokens; 0: none
    out: Tensor,  # shape and dtype of query, contiguous
    variant: str = "",  # one of kernel_variants(), for tests
) -> None:
    """Causal attention of every query row over its request's blocks, into `out`.

    Row i of request r stands at position context_lens[r] - rows + i. The bits of a row's result
    depend on neither the rest of the batch, nor the chunking of its prompt, nor the threads.
    """

def write_kv(
    kv_pool: Tensor,  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    layer: int,
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim], strided but the last
    value: Tensor,  # like key
    slot_mapping: Tensor,  # [num_tokens] int64, distinct
) -> None:
    """Store keys and values of one layer at their slots."""

def sample(
    logits: Tensor,  # [num_rows, vocab_size] float32, strided but the last
    params: bytes,  # one RowParams (csrc/sampling/row.h) a row
    # Of the rows that have some: row, ending ids, logit_bias, prompt (empty without a repetition
    # penalty), output, repetition, frequency and presence penalty.
    edits: list[tuple[int, list[int], dict[int, float], list[int], list[int], float, float, float]],
    variant: str = "",  # one of kernel_variants(), for tests
    masks: NDArray[np.int32] | None = None,  # [num_masked, ceil(vocab_size / 32)] bits
    masked_rows: list[int] = ...,  # [num_masked] whose they are
) -> tuple[list[int], list[tuple[int, float, list[int], list[float]]]]:
    """One token a row, -1 where the largest edited logit is not finite; `logits` stay as they are.

    And for each row that asks: row, the token's log-probability, the likeliest ids, theirs. A row's
    token depends on neither the rest of the batch, nor the threads, nor the variant.
    """

def bump_generations(
    generations: NDArray[np.uint64] | Tensor,  # [num_blocks]
    ids: NDArray[np.int32] | NDArray[np.int64] | Tensor,
) -> None:
    """Add one to each named block's generation, atomically; then a full fence.

    Whoever sees a byte written afterwards sees the new generations too. If an id is out of range,
    no generation has changed.
    """

def copy_spans(
    destination: NDArray[np.uint8],
    source: NDArray[np.uint8],
    spans: NDArray[np.int64],  # [num_spans, 3]: source offset, destination offset, bytes
    cancel: NDArray[np.uint8],  # [1]; not zero: stop soon
) -> int:
    """Copy spans of one region into another; returns the bytes copied, fewer if cancelled."""

def send_spans(
    fd: int,
    region: NDArray[np.uint8],
    spans: NDArray[np.int64],  # [num_spans, 2]: offset, bytes
    start: int,
    cancel: NDArray[np.uint8],  # [1]; not zero: stop soon
    slice_s: float,
) -> int:
    """Send the spans' bytes over a socket from stream position `start` on, for at most `slice_s`.

    Returns the position reached: the end, or less when the slice is over, the peer is slower than
    a few milliseconds, or `cancel` is set. No lock is held; a slice of 0 never waits.

    Raises:
        OSError: the socket failed; ConnectionResetError also when the peer has closed its end.
    """

def recv_spans(
    fd: int,
    region: NDArray[np.uint8],
    spans: NDArray[np.int64],  # [num_spans, 2]: offset, bytes
    start: int,
    cancel: NDArray[np.uint8],  # [1]; not zero: stop soon
    slice_s: float,
) -> int:
    """Receive the spans' bytes from a socket; otherwise like send_spans."""

def checksum_ranges(
    region: NDArray[np.uint8],
    ranges: NDArray[np.int64],  # [n, 2] (offset, nbytes)
    row_bytes: int,
    num_groups: int,
) -> NDArray[np.uint64]:
    """[num_groups], of equal groups of ranges in order; each range is whole rows of the region.

    How a group's rows are cut into ranges makes no difference.
    """

def map_shared(fd: int, size: int, writable: bool) -> NDArray[np.uint8]:
    """[size], the file's first bytes; the array owns the mapping, and may not be written to if so.

    Begins at a multiple of 2 MiB, as huge pages need it.

    Raises:
        OSError: it cannot be mapped.
    """

def commit_huge_pages(region: NDArray[np.uint8]) -> bool:
    """Give a shared region all of its memory now, in huge pages where the kernel has them.

    Returns whether all that can be in huge pages is; every page is there in any case. Takes about
    a second per GiB, without the interpreter lock. Contents stay as they are.

    Raises:
        OSError: there is not so much memory.
    """

def find_stale(
    generations: NDArray[np.uint64],  # [num_blocks]
    block_ids: NDArray[np.int64],
    expected: NDArray[np.uint64],  # one for each of block_ids
) -> int:
    """Index of the first block whose generation is not the expected one; -1: all are.

    Whatever was read before the call is older than the generations it looks at.
    """
