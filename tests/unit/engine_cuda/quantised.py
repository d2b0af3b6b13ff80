"""What products with quantised weights have to give, interpreted here and compiled in tests/gpu."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.cuda.layers.experts import sorted_by_expert
from pdserve.engine.cuda.quantised.experts import multiply_stack
from pdserve.engine.cuda.quantised.linear import QuantisedLinear, device_linear
from pdserve.engine.cuda.quantised.products import multiply
from pdserve.engine.native.linear import LinearResult, empty_packed, linear, pack, pack_codes
from pdserve.engine.plan.forms import WeightForm, coded_form
from pdserve.engine.plan.matrix import Matrix, Part
from pdserve.model_files.coding import Codes, Coding, on_device
from tests.codes import random_codes


def made(weights: Tensor | Codes, form: WeightForm, device: torch.device) -> QuantisedLinear:
    """A layer of these weights, put in two parts; a bias stays 0."""
    rows = weights if isinstance(weights, Tensor) else weights.codes
    matrix = Matrix("", (Part("", range(len(rows))),), range(rows.shape[1]), form)
    found = device_linear(matrix, torch.bfloat16, device)
    assert isinstance(found, QuantisedLinear)
    cut = len(rows) // 3
    for part in (slice(0, cut), slice(cut, len(rows))):
        own = weights[part] if isinstance(weights, Tensor) else weights.rows(part)
        found.put(part.start, own.to(device) if isinstance(own, Tensor) else own)
    return found


def rows_of(count: int, num_in: int, seed: int) -> Tensor:
    """Some with outliers, one of zeros, one far from 1."""
    x = torch.randn(count, num_in, generator=torch.Generator().manual_seed(seed)).bfloat16()
    x[:, seed % num_in] *= 300
    x[count // 2] = 0
    x[-1] *= 2.0**-20
    return x


def check_codes(coding: Coding, sizes: tuple[int, int, int], device: torch.device) -> None:
    """As a CPU multiplies the same codes, to the bit. `sizes`: rows, outputs, inputs."""
    count, num_out, num_in = sizes
    codes, x = random_codes(coding, num_out, num_in, seed=1), rows_of(count, num_in, 7)
    packed = empty_packed(coded_form(coding), num_out, num_in)
    pack_codes(packed, 0, codes)
    expected = linear(x, packed, torch.empty(count, num_out), LinearResult.STORE_FLOAT)
    there = made(codes, coded_form(on_device(coding)), device)
    found = multiply(x.to(device), there.weights, torch.float32)
    assert torch.equal(found.cpu(), expected)


def check_weights(form: WeightForm, sizes: tuple[int, int, int], device: torch.device) -> None:
    """Likewise, of weights that are quantised when they are loaded; floats are near."""
    count, num_out, num_in = sizes
    weights = torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(2))
    weights[1] *= 50
    x = rows_of(count, num_in, 7)
    expected = linear(
        x, pack(weights, form=form), torch.empty(count, num_out), LinearResult.STORE_FLOAT
    )
    found = multiply(x.to(device), made(weights, form, device).weights, torch.float32).cpu()
    if form.name == "fp8":
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    else:
        assert torch.equal(found, expected)


def check_rows(form: WeightForm, most: int, device: torch.device) -> None:
    """A row has the bits that it has alone, whatever the tile; there are `most` rows at most."""
    weights = torch.randn(33, 96 if form.coding is None else 256)
    there = made(weights, form, device).weights
    x = rows_of(most, weights.shape[1], 3).to(device)
    whole = multiply(x, there)
    for rows in (slice(0, 16), slice(most // 2, most // 2 + 1)):
        assert torch.equal(multiply(x[rows], there), whole[rows])


def check_experts(
    form: WeightForm, sizes: tuple[int, int, int], tile: int, device: torch.device
) -> None:
    """Each row by the weights of its expert, with the bits of that expert's own products.

    `sizes`: rows, outputs, inputs.
    """
    num_experts, num_chosen, (num_rows, num_out, num_in) = 4, 2, sizes
    part = Part("", range(num_out))
    matrix = Matrix("", (part,), range(num_in), form, has_bias=True)
    stack = device_linear(matrix, torch.bfloat16, device, num_experts)
    assert isinstance(stack, QuantisedLinear)
    assert stack.bias is not None
    torch.manual_seed(3)
    stack.bias.copy_(torch.randn(num_experts, num_out))
    for number in range(num_experts):
        stack[number].put(0, torch.randn(num_out, num_in).to(device))
    x = rows_of(num_rows, num_in, 3).to(device)
    chosen = torch.rand(num_rows, num_experts - 1).argsort(dim=1)[:, :num_chosen]  # not the last
    places = sorted_by_expert(chosen.to(device), num_experts)
    num_tiles, rows = len(places.order) // tile + num_experts, places.order // num_chosen
    found, again = (
        multiply_stack(
            given,
            stack.weights,
            places,
            tile,
            num_tiles,
            torch.float32,
            is_in_place=is_in_place,
        )
        for given, is_in_place in ((x, False), (x[rows].contiguous(), True))
    )
    assert torch.equal(again, found)
    for number in range(num_experts):
        own = slice(*places.starts[number : number + 2].tolist())
        expected = multiply(x[rows[own]], stack[number].weights, torch.float32)
        assert torch.equal(found[own], expected)
