"""Types and contracts of the native extension (csrc/). It borrows arrays for the length of a call.

Every function checks its arguments before it touches memory: TypeError for a wrong kind of array
(device, dtype, read-only where it is written), ValueError for shapes, strides and values; the
message names the argument, what was expected and what was found.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.models.latent import LatentShape
from pdserve.engine.models.recurrent import RecurrentShape
from pdserve.engine.native.adapters import NativeAdapter
from pdserve.engine.native.weights import NativeWeights
from pdserve.engine.plan.forms import WeightForm

def cpu_features() -> dict[str, bool]:
    """Instruction set extensions: avx2 (with FMA), avx512f (with BW, DQ, VL), avx512_bf16,
    avx512_vnni, amx_bf16 (and the system lets this process use its tiles); on Arm neon_bf16,
    neon_dot, neon_i8mm."""

def kernel_variants() -> list[str]:
    """The kernel builds this CPU can run, best first; the first is used."""

def num_threads() -> int:
    """How many threads share one kernel call; at first the cores this process may use.

    Of the calling thread's workers, if it has its own (`use_core_share`).
    """

def set_num_threads(num_threads: int) -> None:
    """Set how many threads share one kernel call, the caller included (1 to 1024).

    Waits for a running kernel call to end. A forked child starts with the default again.
    """

class CoreShare:
    """The cores that one of two threads may use for its kernel calls, which run side by side.

    Alone, each has all of them. While both compute, one has what it asks for and the other one what
    is left: from the next item of a job on.
    """

    @property
    def num_cores(self) -> int:
        """Cores of both."""

    def ask(self, num_cores: int) -> None:
        """A step begins, for which so many cores are wanted (1 to `num_cores` - 1)."""

    def release(self) -> None:
        """There is nothing to compute."""

    @property
    def asked_by_other(self) -> int:
        """Cores that the other one asks for now; 0: it does not compute."""

    @property
    def allowed(self) -> int:
        """Cores that may be used at the moment."""

    @property
    def mean_cores(self) -> float:
        """Cores that kernel calls have had since `ask`, on average; 0: there were none."""

def split_cores(num_cores: int) -> tuple[CoreShare, CoreShare]:
    """Return the share of what asks for cores, and that of what has the rest (2 to 1024 cores)."""

def use_core_share(share: CoreShare | None) -> None:
    """Have kernel calls of the calling thread use this share, with workers of their own.

    The workers have the thread's affinity, and end with the thread. None: its calls use the
    process's workers again.
    """

class StillTime:
    """For how long a thread has stood still, counted in ticks that came in time."""

    def __init__(self, tick_s: float) -> None:
        """Raises ValueError: it is not positive."""

    def look(self, now_s: float, ran_s: float, num_done: int, may_stand: bool) -> float:
        """Look once, about every tick; return seconds.

        Args:
            now_s: any clock.
            ran_s: processor time that the thread has used.
            num_done: of what it had to do.
            may_stand: it has nothing to do, or waits for a core.
        """

class Watchdog:
    """Finds a thread of this process that stands still, though it has something to do.

    It looks from a thread that needs no interpreter, whose lock the other one may hold.
    """

    def __init__(self, thread: int, clock: int) -> None:
        """Of the thread with this native id, and the clock of its processor time.

        The thread must not end before `stop`.
        """

    def expect(self) -> None:
        """The thread has one thing more to do."""

    def done(self) -> None:
        """It has done one of them."""

    def start(self, tick_s: float, limit_s: float, exit_code: int, signum: int) -> None:
        """Look every `tick_s`, and end the process if the thread stands still for longer than that.

        Before, this is told on stderr, and the watchdog's thread raises `signum` (0: none).

        Raises:
            RuntimeError: it does already.
            ValueError: `tick_s` is not positive.
        """

    def stop(self) -> None:
        """Look no more; nothing happens if it does not."""

    @property
    def still_s(self) -> float:
        """For how long the thread has stood still, as of the last look."""

def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim] float32 or bfloat16, strided but the last
    kv_pool: Tensor,  # [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]
    layer: int,
    query_start: Tensor,  # [num_requests + 1] int32, cumulative rows of query
    context_lens: Tensor,  # [num_requests] int32, KV tokens including the request's own rows
    block_tables: Tensor,  # [num_requests, max_blocks] int32
    scale: float,
    sliding_window: int,  # tokens; 0: none
    out: Tensor,  # shape and dtype of query, contiguous
    variant: str = "",  # one of kernel_variants(), for tests
    cap: float = 0.0,  # scores become cap * tanh(score / cap); 0: they do not
    sinks: Tensor | None = None,  # [num_heads] float32: one more score of each, of no value
) -> None:
    """Causal attention of every query row over its request's blocks, into `out`.

    With n rows, row i of request r is at position context_lens[r] - n + i. A row's result does not
    depend on the rest of the batch, the chunks of its prompt or the threads, bit for bit.
    """

def write_kv(
    kv_pool: Tensor,  # [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]
    layer: int,
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim], strided but the last
    value: Tensor | None,  # like key; None if and only if there is one plane
    slot_mapping: Tensor,  # [num_tokens] int64, distinct
) -> None:
    """Store keys and values of one layer at their slots."""

class PackedMatrix(Protocol):
    """The attributes of a pdserve.engine.native.linear.PackedLinear that are read."""

    @property
    def form(self) -> WeightForm: ...
    @property
    def num_out(self) -> int: ...
    @property
    def num_in(self) -> int: ...
    @property
    def is_gated(self) -> bool: ...
    @property
    def weights(self) -> Tensor: ...  # [packed_size(...)[0]] uint8, aligned to 64 bytes
    @property
    def scales(self) -> Tensor | None: ...  # [packed_size(...)[1]] float32
    @property
    def bias(self) -> Tensor | None: ...  # [packed_size(...)[1]] float32

def packed_size(form: WeightForm, num_out: int, num_in: int, is_gated: bool) -> tuple[int, int]:
    """Return (bytes of a packed matrix, its number of outputs padded to whole panels)."""

def pack_linear_rows(
    packed: PackedMatrix,
    first_row: int,
    rows: Tensor,  # [num_rows, num_in] float32 or bfloat16, strided but the last
) -> None:
    """Copy rows of a weight matrix to their places in a packed matrix.

    The last panel is padded with zeros. Different rows may be packed concurrently, from different
    tensors.

    Raises:
        ValueError: also if a value is not finite and the form is quantised.
    """

def pack_linear_codes(
    packed: PackedMatrix,
    first_row: int,
    codes: Tensor,  # [num_rows, num_in] uint8
    scales: Tensor,  # [num_rows, bytes] uint8: of each group
    minimums: Tensor | None,  # likewise
    super_scales: Tensor | None,  # [num_rows, bytes] uint8: a float16 for each 256 inputs
    super_minimums: Tensor | None,  # likewise
) -> None:
    """Copy rows of codes to their places in a packed matrix, like pack_linear_rows."""

def look_up_codes(
    table: PackedMatrix,
    ids: Tensor,  # [num_rows] int64
    out: Tensor,  # [num_rows, num_in] float32, contiguous
    to_bfloat16: bool,
) -> None:
    """Copy rows of a coded matrix into `out`; if asked for, rounded to bfloat16."""

def linear(
    x: Tensor,  # [num_rows, num_in] float32 or bfloat16, strided but the last
    packed: PackedMatrix,
    out: Tensor,  # [num_rows, num_out], or half as many columns if gated; strided but the last
    result: str = "store",  # store, store_float, add (both into float32), or gated: LinearResult
    variant: str = "",  # one of kernel_variants(), for tests
) -> None:
    """Write x times a packed matrix to `out`.

    A row of the result depends only on that row of x, bit for bit: not on the number of rows or
    threads.
    """

def rotate_and_write(
    qkv: Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], strided but the last
    num_heads: int,
    q_norm: Tensor | None,  # [head_dim] float32; None: heads are not normalised
    k_norm: Tensor | None,  # [head_dim] float32
    norm_eps: float,
    cos_sin: Tensor,  # [num_tokens, head_dim] float32: head_dim / 2 cosines, then the sines
    kv_pool: Tensor,  # [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]
    layer: int,
    slot_mapping: Tensor,  # [num_tokens] int64, distinct
    variant: str = "",  # one of kernel_variants(), for tests
) -> None:
    """Normalise and rotate queries (in place) and keys; store keys and values at their slots.

    Each head is scaled to a root mean square of 1 and by the norm's weights (RMSNorm); then each
    pair (x[i], x[i + head_dim / 2]) is rotated by its angle (RoPE). Rounded once, at the end.
    """

def rms_norm(
    x: Tensor,  # [num_rows, size] float32, contiguous
    weight: Tensor,  # [size] float32
    eps: float,
    out: Tensor,  # shape of x, float32 or bfloat16, contiguous
    variant: str = "",  # one of kernel_variants(), for tests
    adds: bool = False,  # to `out`, which is float32
) -> None:
    """Scale rows to a root mean square of 1, then by `weight`; rounded once, into `out`."""

def gated_delta(
    inputs: Tensor,  # [num_rows, input_width] float32, as a RecurrentShape has it
    taps: Tensor,  # [num_groups, kernel, group_channels] float32, oldest first
    decay: Tensor,  # [num_values] float32, likewise what follows
    decay_bias: Tensor,
    value_norm: Tensor,  # [value_dim]
    num_groups: int,
    key_dim: int,
    num_before: int,  # tokens before the rows; 0: the state begins
    state: Tensor,  # [numbers of a layer's state], which goes on
    out: Tensor,  # [num_rows, num_values * value_dim] float32 or bfloat16
    variant: str = "",  # one of kernel_variants(), for tests
) -> None:
    """Go on with the state of one request in one layer."""

def look_up_rows(
    table: Tensor,  # [num_entries, size] float32 or bfloat16, contiguous
    ids: Tensor,  # [num_rows] int64
    out: Tensor,  # [num_rows, size] float32, contiguous
    variant: str = "",  # one of kernel_variants(), for tests
    scale: float = 1.0,
) -> None:
    """Copy rows of a table, widened to float32 and scaled, into `out`."""

def cap_rows(
    x: Tensor,  # [num_rows, size] float32, strided but the last
    cap: float,
    variant: str = "",  # one of kernel_variants(), for tests
) -> None:
    """x becomes cap * tanh(x / cap)."""

class RanksLost(RuntimeError):
    """Another rank has ended, failed, or not come in time."""

class RankGroup:
    """One of the processes that compute steps together; they meet in shared memory."""

    def __init__(  # stages: how many ranks each has
        self, memory: NDArray[np.uint8], rank: int, stages: Sequence[int]
    ) -> None: ...
    @staticmethod
    def memory_bytes(stages: Sequence[int]) -> int: ...
    def say_ready(self) -> None: ...
    def wait_ready(self, seconds: float) -> bool: ...  # raises RanksLost
    def wait_step(self, last: int) -> int: ...  # raises RanksLost
    # For a rank that stands for another host: rows are [num_rows, width] float32, contiguous.
    def begin_step(self) -> None: ...
    def end_step(self) -> None: ...  # raises RanksLost
    def tell_layers(self, num_layers: int) -> None: ...
    @staticmethod
    def rows_of_part(width: int) -> int: ...
    def give(self, rows: NDArray[np.float32]) -> None: ...  # raises RanksLost
    def take(self, rows: NDArray[np.float32]) -> None: ...  # raises RanksLost
    def give_up(self) -> None: ...
    @property
    def is_lost(self) -> bool: ...

class Decoder:
    """A model on the CPU; one call computes a step."""

    def __init__(
        self,
        weights: NativeWeights,  # held, and read at every step
        *,
        num_heads: int,
        num_kv_heads: int,
        model_kv_heads: int,  # of the whole model, of which this may be one rank's part
        first_kv_head: int,
        vocab_size: int,  # of the whole model
        first_token_id: int,
        num_token_ids: int,
        first_layer: int,  # in the pool
        pool_layers: int,
        hidden_size: int,
        head_dim: int,
        is_bfloat16: bool,  # activations, embedding and KV; else float32
        norm_eps: float,
        sliding_windows: list[int],  # tokens, of each layer that it has; 0: none
        inverse_frequencies: Tensor,  # [2, number of ropes, head_dim / 2] float32, a position:
        # radians of short requests, then of long ones
        rope_scales: list[float],  # of cosines and sines
        layer_ropes: list[int],  # which of them each layer has
        activation: str,  # silu, gelu_tanh or clamped
        attention_scale: float,
        attention_cap: float,  # scores become cap * tanh(score / cap); 0: they do not
        logit_cap: float,  # likewise
        embedding_scale: float,
        logit_scale: float,
        centres_norms: bool,  # of the residual stream
        norms_heads_together: bool,  # all queries and all keys of a token; else each head
        is_parallel: bool,  # the MLP takes what attention takes
        variant: str = "",  # one of kernel_variants(), for tests
        group: RankGroup | None = None,  # the other ranks; held
        latent: LatentShape | None = None,  # of latent attention, if it is that
        recurrent: RecurrentShape | None = None,  # of layers with a state, if there are any
        first_group: int = 0,  # of these, that this rank has
        num_groups: int = 0,
        gates_attention: bool = False,  # by what qkv makes besides
    ) -> None: ...
    def logits(
        self,
        token_ids: Tensor,  # [num_tokens] int64
        positions: Tensor,  # likewise; -1 - position: the request is a long one
        query_start: Tensor,  # [num_requests + 1] int32, cumulative rows
        context_lens: Tensor,  # [num_requests] int32, KV tokens including the request's own rows
        block_tables: Tensor,  # [num_requests, max_blocks] int32
        sampled_rows: Tensor,  # [num_sampled] int64, ascending
        kv_pool: Tensor,  # [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]
        out: Tensor,  # [num_sampled, vocab_size] float32
        ends: list[int] = [],
        done: Callable[[int], None] | None = None,
        state_rows: Tensor | None = None,  # [num_states] int64, ascending
        states_out: Tensor | None = None,  # [num_states, hidden_size] float32
        taps: Tensor | None = None,  # [num_taps] int64: layers; of one rank only
        taps_out: Tensor | None = None,  # [num_tokens, num_taps, hidden_size] float32
        adapters: list[str] = [],  # of each request, the digest or ""; none: no request has one
        adapted_from: list[int] = [],  # of each of these, the first position that it computes
        companions: Tensor | None = None,  # [num_blocks, num_companions] int32; of one rank only
        places: Tensor | None = None,  # [num_layers, 2] int32: block (0: the first), layer in it
        state_tables: Tensor | None = None,  # [num_requests, 3, state_blocks] int32, of hybrids
        kept_after: Tensor | None = None,  # [num_requests] int32, likewise
    ) -> None:
        """Compute a step: write keys and values to the pool, logits of the sampled rows to `out`,
        and the final states of `state_rows` (any rows) to `states_out`. All rows are copied to
        `taps_out` before each layer of `taps`.

        Calls `done` with each number of layers in `ends` once the keys and values of that many
        layers are written; the interpreter lock is held only for this. An exception from `done`
        ends the step.

        Raises:
            RuntimeError: another step of this decoder is running.
        """

    def round_kv(self, codes: str) -> None:
        """Round all KV to what rows of these codes can hold: int8 or fp8."""

    def take_adapter(self, digest: str, adapter: NativeAdapter) -> None:
        """Make an adapter ready for steps, which name it by its digest."""

    def drop_adapter(self, digest: str) -> None:
        """Forget one. A step that is running keeps it."""

    @property
    def workspace_bytes(self) -> int:
        """Size of the memory for activations, which grows with the largest step so far."""

# Of one row: row, forbidden ids, biased ids, biases, ids seen in prompt or output, repetition
# penalty, output ids, what to subtract from their logits. All arrays are one-dimensional; no id is
# there twice, except for the forbidden ones.
Edits: TypeAlias = tuple[
    int,
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.float32],
    NDArray[np.int32],
    float,
    NDArray[np.int32],
    NDArray[np.float32],
]

def sample(
    logits: Tensor,  # [num_rows, vocab_size] float32, strided but the last
    params: bytes,  # one RowParams (csrc/sampling/row.h) a row
    edits: list[Edits],
    variant: str = "",  # one of kernel_variants(), for tests
    masks: NDArray[np.int32] | None = None,  # [num_masked, ceil(vocab_size / 32)] bits
    masked_rows: list[int] = ...,  # [num_masked] the row of each mask
) -> tuple[list[int], list[tuple[int, float, list[int], list[float]]]]:
    """Sample one token for each row. Does not modify `logits`.

    Returns (token ids, log-probabilities). A token id is -1 if the largest edited logit of its row
    is not finite. Log-probabilities, for each row that asks for them: (row, that of its token, the
    likeliest ids, theirs). A row's token does not depend on the rest of the batch, the threads or
    the variant.
    """

def bump_generations(
    generations: NDArray[np.uint64] | Tensor,  # [num_blocks]
    ids: NDArray[np.int32] | NDArray[np.int64] | Tensor,
) -> None:
    """Add one to the generation of each of these blocks, atomically; then a full fence.

    A reader that sees a byte written afterwards also sees the new generations. If an id is out of
    range, no generation is changed.
    """

def copy_spans(
    destination: NDArray[np.uint8],
    source: NDArray[np.uint8],
    spans: NDArray[np.int64],  # [num_spans, 3]: source offset, destination offset, bytes
    cancel: NDArray[np.uint8],  # [1]; not zero: stop soon
    start: int = 0,
    max_bytes: int = ...,
    way: str = "",
) -> int:
    """Copy spans of one region into another, at most `max_bytes` from position `start` on.

    Returns the position reached: less than wanted if cancelled. Each span is copied in the way that
    is the fastest for its size on this machine, or all of them in the named `way`.
    """

def copy_rates() -> dict[int, dict[str, float]]:
    """Return how fast each way copies spans: bytes of a span |-> way |-> bytes per second.

    Each way is there twice: as "cached", and as "cached, summed" for copies that add up sums. Spans
    from each of these sizes up to the next are copied in the fastest way. The first call (or copy)
    in a process measures, which takes about twenty milliseconds.
    """

def block_spans(
    source_ids: NDArray[np.int64],
    destination_ids: NDArray[np.int64],
    block_bytes: int,
    offset: int,
    nbytes: int,
    joins: bool = True,
) -> NDArray[np.int64]:
    """Return the spans that copy bytes offset..offset+nbytes of each source block, for copy_spans.

    Spans that follow each other on both sides are joined, if wanted: [num_spans, 3].
    """

def send_spans(
    fd: int,
    region: NDArray[np.uint8],
    spans: NDArray[np.int64],  # [num_spans, 2]: offset, bytes
    start: int,
    cancel: NDArray[np.uint8],  # [1]; not zero: stop soon
    slice_s: float,
) -> int:
    """Send the spans' bytes over a socket from stream position `start` on, for at most `slice_s`.

    Returns the position reached. It is less than the end if the slice is over, the peer does not
    respond for a few milliseconds, or `cancel` is set. Runs without the interpreter lock; a slice
    of 0 never waits.

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

def copy_blocks(
    destination: NDArray[np.uint8],
    source: NDArray[np.uint8],
    block_bytes: int,
    destination_ids: Sequence[int],
    source_ids: Sequence[int],
    rows: NDArray[np.int64],  # [num_rows, 4]: offset in a block, bytes, first word, (unused)
    last_rows: NDArray[np.int64],  # the same for the last block
    generations: NDArray[np.uint64],  # of the source's blocks
    expected: Sequence[int],  # of these blocks
    sums: bytes,  # of 8 bytes, equally many for each block, or none
) -> int:
    """Copy these rows of blocks, then compare generations and, if there are some, sums.

    Returns -1 if all is as expected, -2 if a generation is not, else the index of the first block
    whose sums do not add up to that of what was copied.
    """

def find_wrong_block(
    region: NDArray[np.uint8],
    block_bytes: int,
    ids: Sequence[int],
    rows: NDArray[np.int64],
    last_rows: NDArray[np.int64],
    sums: bytes,
) -> int:
    """Return the index of the first block whose rows have another sum; -1: none. As copy_blocks."""

def send_blocks(
    fd: int,
    head: bytes,
    region: NDArray[np.uint8],
    block_bytes: int,
    ids: Sequence[int],
    rows: NDArray[np.int64],
    last_rows: NDArray[np.int64],
    generations: NDArray[np.uint64],
    expected: Sequence[int],
    tail: bytes,
    start: int,  # position in all of it
) -> int:
    """Send head, blocks and tail, as far as there is room; returns the position reached.

    The tail goes only after blocks whose generations are the expected ones then. Otherwise returns
    -2, and at the start, before anything is sent, -1.

    Raises:
        OSError: the connection broke.
    """

def receive_blocks(
    fd: int,
    head: bytes,
    region: NDArray[np.uint8],
    block_bytes: int,
    ids: Sequence[int],
    rows: NDArray[np.int64],
    last_rows: NDArray[np.int64],
    tail: NDArray[np.uint8],  # for as many bytes as are behind the blocks
    start: int,  # position in all of it
) -> int:
    """Receive what send_blocks sends, as far as it is there; returns the position reached.

    If something else than the head is there, returns -1, and leaves it in the socket.

    Raises:
        OSError: the connection broke, or was closed.
    """

def copy_summed(
    destination: NDArray[np.uint8],
    source: NDArray[np.uint8],
    spans: NDArray[np.int64],  # [num_spans, 3]: source offset, destination offset, bytes
    places: NDArray[np.int64],  # [num_spans, 2]: first word, which sum
    sums: NDArray[np.uint64],  # [num_sums]
    cancel: NDArray[np.uint8],  # [1]; not zero: stop soon
    start: int = 0,
    max_bytes: int = ...,
    way: str = "",
) -> int:
    """As copy_spans, but also adds what is copied of each span to its sum.

    A call ends between two lines of 64 bytes of a span, so `max_bytes` is at least as much.
    """

def sum_blocks(
    region: NDArray[np.uint8],
    offsets: NDArray[np.int64],  # [num_blocks]
    rows: NDArray[np.int64],  # [num_rows, 4]: offset in a block, bytes, first word, which sum
    num_sums: int,
) -> NDArray[np.uint64]:
    """Return the sums of these rows in each block: [num_blocks, num_sums].

    A word of 8 bytes adds to a sum by its value and its number; bytes that the last word of a row
    lacks count as 0. Sums wrap around at 2**64.
    """

def find_wrong(
    found: NDArray[np.uint64],  # [num_blocks]
    expected: NDArray[np.uint64],  # [num_blocks * per_block]
    per_block: int,
) -> int:
    """Return the first block whose sum is not that of its `per_block` expected ones; -1: none."""

def split_planes(
    numbers: NDArray[np.uint8],
    planes: NDArray[np.uint8],
    width: int,
) -> None:
    """Split numbers of `width` bytes, 2 or 4: first the uppermost byte of each, then the rest."""

def join_planes(
    planes: NDArray[np.uint8],
    numbers: NDArray[np.uint8],
    width: int,
) -> None:
    """Join what split_planes has split."""

def code_rows(
    numbers: NDArray[np.uint8],
    coded: NDArray[np.uint8],
    row_dim: int,
    is_bfloat16: bool,
    codes: str,  # int8 or fp8
    variant: str = "",
) -> bool:
    """Code rows of numbers, bfloat16 or float32, as `row_dim` codes and a scale each.

    Returns whether decode_rows will give the same bits, as it does for rows that were rounded so.
    """

def decode_rows(
    coded: NDArray[np.uint8],
    numbers: NDArray[np.uint8],
    row_dim: int,
    is_bfloat16: bool,
    codes: str,  # int8 or fp8
    variant: str = "",
) -> None:
    """Decode what code_rows has made. Every build makes the same bits."""

def map_shared(fd: int, size: int, writable: bool) -> NDArray[np.uint8]:
    """Map the first `size` bytes of a file: [size]. The array owns the mapping.

    It begins at a multiple of 2 MiB, as huge pages require. If not `writable`, it is read-only.

    Raises:
        OSError: it cannot be mapped.
    """

def read_in(region: NDArray[np.uint8]) -> bool:
    """Read the file behind a mapping of map_shared, and map all of its pages.

    Uses huge pages if the file system supports them and the page cache does not hold small pages
    already. Returns False if the kernel does not support this (before Linux 5.14), or the file
    cannot be read.
    """

class Ledger:
    """What the places of a node share (`csrc/places/ledger.h`): memory in bytes, and turns.

    Times are of CLOCK_MONOTONIC, in seconds. Methods do not wait, unless they say so.
    """

    def __init__(self, path: str, place: int, budget: int) -> None:
        """Map the file, which is made if it is not there, as the place of this number (0 to 15).

        The budget is that of who came first of those that are there.

        Raises:
            OSError: the file cannot be used; BlockingIOError: another process is that place.
            ValueError: there cannot be such a place, or the others have another budget.
        """

    @property
    def budget(self) -> int:
        """Bytes of weights and KV that all may have."""

    @property
    def held(self) -> int:
        """Bytes of KV that this place has."""

    @property
    def room(self) -> int:
        """Bytes that it can take now."""

    @property
    def reach(self) -> int:
        """Bytes that it could take if others gave back what no request uses."""

    @property
    def owed(self) -> int:
        """Bytes that others lack, and this place has above its floor."""

    @property
    def changes(self) -> int:
        """Counts changes of what there is for others."""

    @property
    def num_waiting(self) -> int:
        """How many others wait for their turn."""

    def enter(self, weights: int, floor: int) -> bool:
        """Be awake with these weights, and have that much KV for certain; False: too much."""

    def fits(self, weights: int, floor: int) -> bool:
        """Whether `enter` could be true once others have given back all that they can."""

    def leave(self) -> None:
        """Have nothing, and not the turn."""

    def take(self, num_bytes: int) -> bool:
        """Take memory for KV; False: there is too little."""

    def give(self, num_bytes: int) -> None:
        """Give memory for KV back."""

    def set_used(self, num_bytes: int) -> None:
        """Tell how much of what is held requests use."""

    def set_wanted(self, num_bytes: int) -> None:
        """Tell how much is lacking."""

    def clear_dead(self) -> bool:
        """Free what places have whose process has ended; whether there were any."""

    def await_change(self, seen: int, within_s: float) -> int:
        """Wait, without the interpreter lock, for another number of changes than `seen`."""

    def try_turn(self, lease_s: float) -> bool:
        """Take the turn, unless another place has it, which it may not keep for longer."""

    def await_turn(self, due_s: float, lease_s: float, within_s: float) -> bool:
        """Wait for the turn, without the interpreter lock; whether it came.

        Whoever has it gives it to the place whose step is due first. If that one has died, or its
        lease is over, it is taken away.
        """

    def pass_turn(self, has_more: bool, due_s: float = 0.0, lease_s: float = 0.0) -> bool:
        """Give the turn on after a step, unless the next one here is due before those of others.

        Returns whether it is kept.
        """

def free_pages(region: NDArray[np.uint8]) -> None:
    """Give the whole pages of a shared region back to the system: they are zeroes from then on.

    Raises:
        OSError: the memory may not be cut, as where others may not write.
    """

def commit_huge_pages(region: NDArray[np.uint8]) -> bool:
    """Allocate all memory of a shared region now, in huge pages if the kernel has them.

    Returns whether everything that can be in huge pages is in huge pages; otherwise some pages are
    small. Takes about a second per GiB, without the interpreter lock. Keeps the contents.

    Raises:
        OSError: there is not enough memory.
    """

def find_stale(
    generations: NDArray[np.uint64],  # [num_blocks]
    block_ids: NDArray[np.int64],
    expected: NDArray[np.uint64],  # one for each of block_ids
) -> int:
    """Return the index of the first block whose generation is not the expected one; -1 if none.

    Everything read before the call was read before the generations are.
    """

class _Tables(Protocol):
    """The attributes of coordinator.routing.tables.StepTables that are read.

    A step of no tokens takes 0 seconds.
    """

    @property
    def seconds(self) -> NDArray[np.float64]: ...  # [num_rows, most tokens + 1] of steps
    @property
    def rising(self) -> NDArray[np.float64]: ...  # the same, none less than one before it
    @property
    def num_tabulated(self) -> NDArray[np.int64]: ...  # [num_rows] most tokens of a row; ...
    @property
    def token_budget(self) -> NDArray[np.int64]: ...  # ... this and the next are no more
    @property
    def max_batch(self) -> NDArray[np.int64]: ...
    @property
    def full_step_s(self) -> NDArray[np.float64]: ...
    @property
    def sampled_s(self) -> NDArray[np.float64]: ...
    @property
    def pair_s(self) -> NDArray[np.float64]: ...
    @property
    def context_s(self) -> NDArray[np.float64]: ...

class _Nodes(Protocol):
    """The attributes of coordinator.routing.fleet.Fleet that are read; all [num_slots]."""

    @property
    def row(self) -> NDArray[np.int64]: ...  # of the tables
    @property
    def kv_tokens(self) -> NDArray[np.int64]: ...
    @property
    def kv_companions(self) -> NDArray[np.int64]: ...
    @property
    def kv_seen(self) -> NDArray[np.int64]: ...
    @property
    def kv_state(self) -> NDArray[np.int64]: ...
    @property
    def prefill_ratio(self) -> NDArray[np.float64]: ...
    @property
    def decode_ratio(self) -> NDArray[np.float64]: ...
    @property
    def pull_fixed_s(self) -> NDArray[np.float64]: ...
    @property
    def pull_token_s(self) -> NDArray[np.float64]: ...
    @property
    def tier_fixed_s(self) -> NDArray[np.float64]: ...
    @property
    def tier_token_s(self) -> NDArray[np.float64]: ...

class _Loads(Protocol):
    """The attributes of coordinator.routing.loads.decode.DecodeLoad that are read.

    All [num_slots].
    """

    @property
    def others(self) -> NDArray[np.int64]: ...
    @property
    def others_context(self) -> NDArray[np.int64]: ...

class _Calendar(Protocol):
    """The attributes of coordinator.routing.loads.decode.LoadForecast that are read.

    It is a ring of buckets.
    """

    @property
    def requests(self) -> NDArray[np.int64]: ...  # [num_buckets, num_slots]
    @property
    def tokens(self) -> NDArray[np.int64]: ...  # [num_buckets, num_slots]
    @property
    def present(self) -> int: ...  # this moment's bucket, counted from the clock's zero
    @property
    def bucket_s(self) -> float: ...

class _Texts(Protocol):
    """The attributes of pdserve.engine.request.Request that drafts read."""

    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def output_token_ids(self) -> list[int]: ...

class OwnText:
    """Earlier places of a text that read as its end does, and how it went on there."""

    def __init__(self) -> None: ...
    def propose(self, request: _Texts, most: int) -> tuple[list[int], int]:
        """Return at most so many tokens that may come next, and how many before them match.

        The text is the prompt and the output so far. What is new of it is added, of a long text a
        slice with each call; before all of it is, there are none.
        """

    def __len__(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

class OtherTexts:
    """Places of other texts that read as the end of one does, and how they went on there."""

    def __init__(self, most_tokens: int) -> None:
        """At least so many are kept, at most twice as many: the oldest are written over."""

    def add(self, text: Sequence[int]) -> None:
        """Add a text; no proposal goes past its end."""

    def propose(self, request: _Texts, most: int) -> tuple[list[int], int]:
        """Return at most so many tokens that may come next, and how many before them match."""

    @property
    def num_bytes(self) -> int: ...

class FleetView:
    """All nodes at one moment, from the view of one request: the router's arithmetic.

    Arrays are indexed by slot unless said otherwise. It borrows the arrays it is made of, so it is
    valid until a member joins or a cost changes.
    """

    def __init__(
        self,
        tables: _Tables,
        nodes: _Nodes,
        loads: _Loads,
        calendar: _Calendar,
        now_s: float,
        context: int,  # of the request, on average over its life
        num_tokens: int,  # of its KV at its end
        limit_s: float,  # of a step with it
        yielding: NDArray[np.int64],  # requests of a batch that may have to give it their places
    ) -> None: ...
    def prompts(
        self,
        num_tokens: int,
        slots: NDArray[np.int64],  # [num_hits] nodes that hold a part of the prompt, distinct
        held: NDArray[np.int64],  # [num_hits] tokens, less than the prompt has
        in_pool: NDArray[np.int64],  # [num_hits] of these, not in the host tier
        out: NDArray[np.float64],
    ) -> None:
        """Write the seconds that each node needs for a prompt alone.

        The KV is computed, loaded from the host tier, or pulled from the node that holds most of
        it, whichever is fastest.
        """

    def has_place(self, slot: int) -> bool:
        """Return whether a node's batch of now has a place for the request (`rules.batch`)."""

    def paces(self, in_s: float, full_s: float, out: NDArray[np.float64]) -> None:
        """Write the seconds per token in each node's batch `in_s` from now, with the request in it.

        `full_s` is added for nodes without a place for it.
        """

    def handoffs(
        self,
        num_tokens: int,
        slots: NDArray[np.int64],  # as for `prompts`
        held: NDArray[np.int64],
        in_pool: NDArray[np.int64],
        prompt_s: float,  # time of the prompt alone, where it is prefilled
        ttft_s: float,
        out: NDArray[np.float64],
    ) -> None:
        """Write the seconds that the KV transfer to each node still takes after token 1.

        Token 1 is sampled `ttft_s` from now. Chunks are pulled while the next ones are computed;
        KV in the node's host tier is loaded meanwhile.
        """

    def on_one_node(
        self,
        slots: NDArray[np.int64],
        queue_s: NDArray[np.float64],  # prefill queued before the prompt
        prompt_s: NDArray[np.float64],
        num_prompts: NDArray[np.int64],  # in the queues
        ttft_s: float,  # promised, or usual
        tpot_s: float,
        output_tokens: int,
        out: NDArray[np.float64],  # [7, slots]
    ) -> None:
        """Predict a request that a node does alone, beside its streams.

        Rows of `out`: when the prompt begins, TTFT, TPOT, the part of TPOT spent waiting for chunks
        of other prompts, harm to others, and 1 if there is no place for the stream: when token 1 is
        there, and at some time from then to its end.
        """

    def place(self, slot: int, ready_s: float) -> tuple[float, float]:
        """Return (wait, pace) at the node's first place that stays free, from `ready_s` on.

        If there is none, at the end of the calendar.
        """

    def within(self, slots: NDArray[np.int64], tpot_s: float) -> float | None:
        """Return the seconds until one of these nodes has a place at this pace; None: unknown."""

def least(
    costs: NDArray[np.float64],  # by slot
    slots: NDArray[np.int64],
    most: int,
) -> list[int]:
    """Return the `most` slots with the lowest costs, ascending; of equals the first ones."""

def cheapest(
    costs: NDArray[np.float64],  # by slot
    loads: NDArray[np.int64],  # by slot
    slots: NDArray[np.int64],
    equal: float,
) -> list[int]:
    """Return the least loaded of the slots whose cost is at most 1 + `equal` times the lowest."""

def sized_texts(data: memoryview, position: int, count: int) -> tuple[list[str], int]:
    """Read so many UTF-8 texts from a place on, each behind its size in bytes (a uint64).

    Stops at the first one that ends beyond the data, or is no UTF-8. Returns the texts before it,
    and where the next one would begin.
    """

def token_pairs(texts: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Find the pairs of tokens that are one together, whose score is finite.

    Those with the highest score come first; of equals, those with the lowest ids.
    """

def json_shape(text: bytes) -> tuple[int, int, int, int]:
    """Count what parsing a JSON text would create, without parsing it.

    Returns (lists and objects, members of objects, commas, nesting depth). Takes a millisecond for
    some MiB. The text need not be valid: a parser stops at its first error, before it has created
    more than was counted.
    """

class TokenRun:
    """The output of one request as it arrives: all of it, and what nobody has read yet."""

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    @property
    def token_ids(self) -> list[int]:
        """All tokens so far, copied."""

    @property
    def is_open(self) -> bool:
        """Whether `add_tokens` adds to it."""

    def extend(self, token_ids: list[int]) -> None:
        """Add tokens that whoever reads the run gets in another way."""

    def open(self, until_s: float) -> None:
        """Have `add_tokens` add to it until this moment."""

    def close(self) -> None:
        """Have it add nothing any more."""

    def read(self) -> list[tuple[int, list[int], float]]:
        """Return what nobody has read: (output index, tokens, when they came) of each arrival."""

class _HasRun(Protocol):
    """A request with a run."""

    @property
    def output(self) -> TokenRun: ...

_R = TypeVar("_R", bound=_HasRun)

def add_tokens(
    running: dict[str, _R],
    ids: list[str],
    indices: list[int],  # of each token in the output of the request with this id
    token_ids: list[int],
    now_s: float,
) -> tuple[list[_R], list[int], int]:
    """Add tokens to the open runs of requests, each if it is the next one.

    Returns the requests that have tokens to be read now and had none, the positions of the tokens
    that were not added although there is such a request, and the number of those that were. Raises
    ValueError: the columns differ in length.
    """

class Histogram:
    """Counts of values by bucket. One thread at a time may observe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the greatest value of each bucket, rising; one more has all beyond."""

    def observe(self, value: float) -> None: ...
    @property
    def counts(self) -> list[int]: ...
    @property
    def sum(self) -> float: ...

class PieceTable:
    """The bytes that tokens stand for, as far as they were told."""

    def __init__(self) -> None: ...
    def add(self, token_id: int, piece: bytes, is_special: bool) -> None: ...

class TextDecoder:
    """The text of a stream of bytes, in pieces that are whole characters."""

    def __init__(self, pieces: PieceTable, skips_special: bool, keeps_some: bool) -> None:
        """For `TextStream`: whether special tokens have no text, and whether some do all the same.

        Which ones is not said, so then it makes no event of any.
        """

    def decode(self, piece: bytes) -> str:
        """Return the characters that are complete with these bytes; U+FFFD for what is none."""

    def finish(self) -> str:
        """Return U+FFFD if a character is not complete, and forget it."""

    @property
    def is_inside_character(self) -> bool: ...

class _Transport(Protocol):
    """As asyncio's."""

    def is_closing(self) -> bool: ...
    def get_write_buffer_size(self) -> int: ...
    def write(self, data: bytes) -> None: ...

class WrittenText:
    """What a `TextStream` has written."""

    @property
    def tokens(self) -> int: ...
    @property
    def chars(self) -> int: ...
    @property
    def last_s(self) -> float:
        """When the last token came."""

    @property
    def text_s(self) -> float:
        """When the last token with text came; 0: none had any."""

class TextStream:
    """Writes events that hold nothing but the text of a run's tokens."""

    def __init__(
        self,
        decoder: TextDecoder,
        gaps: Histogram,
        transport: _Transport,
        before: bytes,
        behind: bytes,
        is_chunk: bool,
        most_tokens: int,
        most_unread_bytes: int,
        last_s: float,
    ) -> None:
        """
        Args:
            gaps: between tokens, s.
            before, behind: what is around the text in each event.
            is_chunk: whether an event is a chunk of HTTP/1.1.
            last_s: when the token before came.
        """

    def write(self, run: TokenRun) -> bool:
        """Write what the run has as one event.

        False, and nothing is read: there are more than `most_tokens`, the text of one has not been
        told, or `most_unread_bytes` would wait for the client. Raises what the transport raises.
        """

    @property
    def written(self) -> WrittenText: ...
