"""KV that is rounded as it is stored: to the bit as the oracle does, in whatever chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kv_transfer.codecs.catalog import codecs_for
from pdserve import _native
from pdserve.engine.kv.coded_rows import rounded
from pdserve.kv import KvDtype
from tests.matrix import matrix
from tests.requests import make_request
from tests.unit.engine_model.harness import Node, make_prompt

ELEMENTS = {KvDtype.INT8: torch.int8, KvDtype.FP8: torch.uint8}
FAMILIES = ["llama", "deepseek_v3"]


def kv_of(node: Node, prompt: list[int], chunk: int = 10**6) -> tuple[Tensor, list[int]]:
    """Rows of the blocks of one request, and its tokens."""
    request = make_request(prompt)
    node.generate([request], 6, chunk)
    full = request.block_table[: len(prompt) // node.kv_cache.layout.block_size]
    return node.kv_cache.pool[full].clone(), request.output_token_ids


@pytest.mark.parametrize("family", matrix(FAMILIES, 1))
@pytest.mark.parametrize("codes", list(ELEMENTS))
@pytest.mark.parametrize("dtype", [KvDtype.BFLOAT16, KvDtype.FLOAT32])
def test_rows_are_rounded_as_they_are_stored(
    dtype: KvDtype, codes: KvDtype, family: str, checkpoint_of: Callable[..., Path]
) -> None:
    path, prompt = checkpoint_of(family), make_prompt(70)
    plain, _ = kv_of(Node.load(path, dtype=dtype), prompt)
    node = Node.load(path, dtype=dtype, rounded_to=codes)
    found, tokens = kv_of(node, prompt)
    # The first layer's KV depends on no attention, the others' on what was rounded before.
    assert torch.equal(found[:, 0], rounded(plain[:, 0], ELEMENTS[codes]))
    assert not torch.equal(found[:, 0], plain[:, 0])
    assert torch.equal(rounded(found, ELEMENTS[codes]), found)
    in_chunks, again = kv_of(Node.load(path, dtype=dtype, rounded_to=codes), prompt, 7)
    assert torch.equal(in_chunks, found)
    assert again == tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("codes", list(ELEMENTS))
def test_what_was_rounded_is_sent_as_codes(
    codes: KvDtype, family: str, checkpoint_of: Callable[..., Path]
) -> None:
    node = Node.load(checkpoint_of(family), dtype=KvDtype.BFLOAT16, rounded_to=codes)
    found, _ = kv_of(node, make_prompt(70))
    chunk = found.view(torch.uint8).numpy().reshape(-1)
    codec = codecs_for(node.kv_cache.layout)[str(codes)]
    (coded,) = codec.encode(chunk)
    dim = node.kv_cache.layout.head_dim
    assert len(coded) * 2 * dim == len(chunk) * (dim + 4)
    back = np.empty_like(chunk)
    codec.decode(np.frombuffer(coded, dtype=np.uint8), back)
    assert np.array_equal(back, chunk)
    for variant in _native.kernel_variants():
        own = np.empty(len(coded), dtype=np.uint8)
        assert _native.code_rows(chunk, own, dim, True, str(codes), variant)
        assert np.array_equal(own, coded)


@pytest.mark.parametrize("codes", list(ELEMENTS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_rounded_stays_as_it_is(dtype: torch.dtype, codes: KvDtype) -> None:
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.exp2(torch.randint(-140, 120, (4096, 1), generator=generator).float())
    numbers = (torch.randn(4096, 24, generator=generator) * magnitudes).to(dtype)
    numbers[0], numbers[1, 3] = 0.0, torch.inf
    once = rounded(numbers, ELEMENTS[codes])
    assert torch.equal(rounded(once, ELEMENTS[codes])[2:], once[2:])
    assert once[1].isnan().all()
    error = (once[2:] - numbers[2:]).abs().amax(-1) / numbers[2:].abs().amax(-1)
    is_large = numbers[2:].abs().amax(-1) > 2.0**-90
    assert error[is_large].max() < 0.04  # of fp8 a 28th, of int8 a 254th
