"""Random batches over a shuffled paged pool, and the shapes that the kernel tests draw."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from pdserve import _native
from pdserve.engine.attention import AttentionBatch
from pdserve.engine.kv.coded_rows import encoded

VARIANTS = _native.kernel_variants()
# For what each build has to do: by default, the one that computes here, and the one of any machine.
EACH_VARIANT = [
    pytest.param(variant, marks=[] if variant in (VARIANTS[0], "portable") else pytest.mark.long)
    for variant in VARIANTS
]
DTYPES = [torch.float32, torch.bfloat16]
CODES = [torch.int8, torch.uint8]  # of pools that have codes; the second are bits of float8
GPU_DTYPES = [*DTYPES, torch.float16]

# Largest difference from the float32 reference, for values of about unit size: a few roundings in
# float32; in bfloat16 one rounding of the result, where the two may fall on either side.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's attention and of its pool."""

    num_kv_heads: int = 2
    group_size: int = 2
    head_dim: int = 64
    block_size: int = 16
    num_layers: int = 2
    dtype: torch.dtype = torch.float32
    cap: float | None = None  # of scores
    codes: torch.dtype | None = None  # elements of the pool; None: it is of `dtype`
    has_sinks: bool = False
    value_dim: int | None = None  # of latent attention, with one plane; None: there are two

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class Case:
    """One step: `rows[r]` new tokens of request r, which then has `context_lens[r]`."""

    shape: Shape
    kv_pool: Tensor
    query: Tensor
    batch: AttentionBatch
    sinks: Tensor | None = None  # [num_heads] float32


def shapes() -> st.SearchStrategy[Shape]:
    """Real head sizes and odd ones; every path of the kernels: pairs, tails, padding."""
    return st.builds(
        Shape,
        num_kv_heads=st.integers(1, 4),
        group_size=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12, 16]),
        head_dim=st.sampled_from([1, 8, 31, 32, 64, 80, 96, 128, 256]),
        block_size=st.one_of(st.integers(1, 32), st.sampled_from([48, 64, 100])),
        num_layers=st.integers(1, 3),
        cap=st.sampled_from([None, None, 0.7, 20.0]),
        dtype=st.sampled_from(DTYPES),
    )


def stored_shapes() -> st.SearchStrategy[Shape]:
    """The same, over pools of any kind, and with sinks."""
    codes = st.sampled_from([None, *CODES])
    return st.builds(
        lambda shape, codes, has_sinks: dataclasses.replace(
            shape, codes=codes, has_sinks=has_sinks
        ),
        shapes(),
        codes,
        st.booleans(),
    )


# Tokens around the ends of the runs in which keys are gone through.
LONG = st.sampled_from([447, 511, 512, 513, 1030])


def requests() -> st.SearchStrategy[list[tuple[int, int]]]:
    """A ragged batch as (rows, tokens before them): decode steps, prefill chunks, empty ones."""
    row_counts = st.one_of(st.just(1), st.integers(0, 70), st.sampled_from([16, 63, 64, 65, 130]))
    earlier = st.one_of(st.just(0), st.integers(0, 150), st.sampled_from([63, 64, 127, 300]), LONG)
    return st.lists(st.tuples(row_counts, earlier), min_size=0, max_size=4)


def make_case(
    shape: Shape, requests: list[tuple[int, int]], seed: int = 0, is_strided: bool = False
) -> Case:
    """A pool of random contents with NaN wherever no kernel may look, and a random query."""
    torch.manual_seed(seed)
    rows = [num_rows for num_rows, _ in requests]
    context_lens = [num_rows + earlier for num_rows, earlier in requests]
    kv_pool, block_tables = make_pool(shape, context_lens)
    num_tokens = sum(rows)
    query = strided((num_tokens, shape.num_heads, shape.head_dim), shape.dtype, is_strided)
    batch = AttentionBatch(
        query_start=torch.tensor([0, *rows]).cumsum(0).int(),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=block_tables,
        slot_mapping=slots_of(shape, block_tables, rows, context_lens),
    )
    sinks = 2 * torch.randn(shape.num_heads) if shape.has_sinks else None
    return Case(shape, kv_pool, query, batch, sinks)


def alone(case: Case, request: int, first: int, last: int) -> Case:
    """Rows [first, last) of one request, as a step of their own right after the rows before."""
    start = int(case.batch.query_start[request])
    num_rows = int(case.batch.query_start[request + 1]) - start
    context_len = int(case.batch.context_lens[request]) - num_rows + last
    batch = AttentionBatch(
        query_start=torch.tensor([0, last - first], dtype=torch.int32),
        context_lens=torch.tensor([context_len], dtype=torch.int32),
        block_tables=case.batch.block_tables[request : request + 1],
        slot_mapping=case.batch.slot_mapping[start + first : start + last],
    )
    return dataclasses.replace(case, query=case.query[start + first : start + last], batch=batch)


def make_pool(shape: Shape, context_lens: list[int]) -> tuple[Tensor, Tensor]:
    """A pool in which blocks are shuffled and slots without a token hold NaN; its block tables.

    Where the pool has codes, NaN is a scale.
    """
    num_blocks = [-(-n // shape.block_size) for n in context_lens]
    total = sum(num_blocks) + 2
    num_planes = 2 if shape.value_dim is None else 1
    of_heads = num_planes, shape.num_kv_heads, shape.block_size, shape.head_dim
    kv_pool = torch.randn((total, shape.num_layers, *of_heads)).to(shape.dtype)
    block_ids = torch.randperm(total, dtype=torch.int32)
    # One column more than needed; what stands past a request's context is no block id.
    block_tables = torch.full((len(context_lens), max(num_blocks, default=0) + 1), -7).int()
    first = 0
    for r, (count, context_len) in enumerate(zip(num_blocks, context_lens, strict=True)):
        block_tables[r, :count] = block_ids[first : first + count]
        first += count
        if context_len % shape.block_size:
            last = int(block_tables[r, count - 1])
            kv_pool[last, :, :, :, context_len % shape.block_size :] = float("nan")
    kv_pool[block_ids[first:]] = float("nan")
    if shape.codes is not None:
        kv_pool = encoded(kv_pool, shape.codes)
    return kv_pool, block_tables


def slots_of(
    shape: Shape, block_tables: Tensor, rows: list[int], context_lens: list[int]
) -> Tensor:
    """[num_tokens] int64: where each row's own key and value stand."""
    slots = [torch.zeros(0, dtype=torch.int64)]
    for r, (num_rows, context_len) in enumerate(zip(rows, context_lens, strict=True)):
        positions = torch.arange(context_len - num_rows, context_len)
        blocks = block_tables[r, positions // shape.block_size].long()
        slots.append(blocks * shape.block_size + positions % shape.block_size)
    return torch.cat(slots)


def strided(size: tuple[int, int, int], dtype: torch.dtype, is_strided: bool) -> Tensor:
    """Random [num_tokens, num_heads, head_dim]; if strided, a slice of fused rows like q|k|v."""
    num_tokens, num_heads, head_dim = size
    if not is_strided:
        return torch.randn(size).to(dtype)
    fused = torch.randn(num_tokens, num_heads + 3, head_dim + 5).to(dtype)
    return fused[:, 2 : 2 + num_heads, 4 : 4 + head_dim]
