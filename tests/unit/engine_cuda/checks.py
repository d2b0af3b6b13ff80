"""What the Triton kernels have to give, on whatever device they run: here interpreted on a CPU,
in tests/gpu compiled on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pdserve.engine.attention import AttentionBackend, AttentionBatch, LayerKv
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda.layers import experts, rows
from pdserve.engine.experts import Experts
from pdserve.engine.kv.coded_rows import decoded
from pdserve.engine.layers import GATED, Linear, gated_clamped, rms_norm
from pdserve.engine.models.arithmetic import Activation
from pdserve.engine.models.expert_config import ExpertConfig, ExpertNames
from pdserve.engine.rope import rotate
from tests.kernels.cases import Case, Shape, make_case

# Of unit-sized values. In half precision the weights and the result are rounded, and for bfloat16
# the interpreter cuts off where a GPU rounds.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2, torch.float16: 2e-3}


def on(case: Case, device: torch.device) -> Case:
    """The same case on another device; strides stay."""
    batch = AttentionBatch(
        query_start=case.batch.query_start.to(device),
        context_lens=case.batch.context_lens.to(device),
        block_tables=case.batch.block_tables.to(device),
        slot_mapping=case.batch.slot_mapping.to(device),
    )
    sinks = None if case.sinks is None else case.sinks.to(device)
    tensors = {"kv_pool": case.kv_pool.to(device), "query": case.query.to(device)}
    return replace(case, **tensors, batch=batch, sinks=sinks)


def attend(
    backend: AttentionBackend, case: Case, window: int | None = None, layer: int = 0
) -> Tensor:
    shape = case.shape
    of_heads = shape.cap, case.sinks, shape.value_dim
    kv = LayerKv(case.kv_pool, layer, shape.scale, window, *of_heads)
    return backend.attend(case.query, kv, case.batch)


def check_attention(
    backend: AttentionBackend, case: Case, window: int | None, layer: int = 0
) -> None:
    """Against the reference, in float32 on the same numbers."""
    found = attend(backend, case, window, layer)
    assert found.is_contiguous()
    assert found.dtype == case.query.dtype
    wide = replace(case, query=case.query.float(), kv_pool=case.kv_pool.nan_to_num())
    expected = attend(ReferenceAttention(), wide, window, layer)
    tolerance = TOLERANCE[case.shape.dtype]
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def check_place(backend: AttentionBackend, case: Case) -> None:
    """The result goes where it is wanted, among other rows, and is the same there."""
    memory = torch.full((len(case.query) + 2, *case.query.shape[1:]), 7.0).to(case.query)
    kv = LayerKv(case.kv_pool, 0, case.shape.scale)
    found = backend.attend(case.query, kv, case.batch, memory[1:-1])
    assert found.data_ptr() == memory[1:-1].data_ptr()
    assert torch.equal(found, attend(backend, case))
    assert (memory[[0, -1]] == 7.0).all()


def check_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(1)
    residual = torch.randn(shape, device=device)
    delta = torch.randn(shape, device=device).to(dtype)
    weight = torch.randn(shape[1], device=device).to(dtype)
    for added in (None, delta):
        total = residual if added is None else residual + added.float()
        expected = rms_norm(total, weight.float(), 1e-6)
        updated = residual.clone()
        found = rows.add_rms_norm(updated, added, weight, 1e-6)
        assert found.dtype == dtype
        assert torch.equal(updated, total)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def check_norm_of_what_a_sublayer_made(dtype: torch.dtype, device: torch.device) -> None:
    """By float32 weights, of rows of any dtype, into any dtype."""
    made = torch.randn(5, 70, device=device).to(dtype)
    weight = torch.randn(70, device=device)
    for out in (dtype, torch.float32):
        found = rows.add_rms_norm(made, None, weight, 1e-6, out)
        assert found.dtype == out
        tolerance = TOLERANCE[out]
        expected = rms_norm(made.float(), weight, 1e-6)
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def check_silu_mul(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(2)
    gate_up = (torch.randn(shape[0], 2 * shape[1], device=device) * 4).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    gelu = torch.nn.functional.gelu(gate, approximate="tanh") * up
    clamped = gated_clamped((gate_up * 3).float())  # more are beyond 7
    for given, gated, wanted in (
        (gate_up, rows.silu_mul, expected),
        (gate_up, rows.gelu_mul, gelu),
        (gate_up * 3, rows.clamped_mul, clamped),
    ):
        found = gated(given)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), wanted, atol=1e-5, rtol=TOLERANCE[dtype])


def check_experts(
    num_rows: int,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_gpt_oss: bool = False,
) -> None:
    """`sizes`: experts, chosen ones, hidden size, inner width. gpt-oss has biases, and clamps."""
    num_experts, num_chosen, hidden, inner = sizes
    names = ExpertNames("mlp", "gate", "up", "down")
    config = ExpertConfig(num_experts, num_chosen, inner, True, frozenset({0}), names)
    torch.manual_seed(4)

    def matrices(num_out: int, num_in: int) -> Linear:
        weights = torch.randn(num_experts, num_out, num_in, device=device) * num_in**-0.5
        bias = torch.randn(num_experts, num_out, device=device) if is_gpt_oss else None
        return Linear(weights.to(dtype), None if bias is None else bias.to(dtype))

    router = Linear(torch.randn(num_experts, hidden, device=device), None)
    layer = Experts(config, router, matrices(2 * inner, hidden), matrices(hidden, inner))
    x = torch.randn(num_rows, hidden, device=device).to(dtype)
    activation = Activation.CLAMPED if is_gpt_oss else Activation.SILU
    found = experts.mix_experts(x, layer, rows.GATED[activation])
    assert found.dtype == torch.float32
    gate_up, down = (
        Linear(stack.weight.float(), None if stack.bias is None else stack.bias.float())
        for stack in (layer.gate_up, layer.down)
    )
    wide = replace(layer, gate_up=gate_up, down=down)
    tolerance, expected = TOLERANCE[dtype], wide(x.float(), GATED[activation])
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def check_rotate_and_write(shape: Shape, has_norm: bool, device: torch.device) -> None:
    """Five tokens, the third of which has no slot; everything else in the pool stays."""
    case = on(make_case(shape, [(4, 30), (1, 3)]), device)
    num_qk, num_kv = shape.num_heads + shape.num_kv_heads, shape.num_kv_heads
    head_dim = shape.head_dim
    torch.manual_seed(3)
    heads = torch.randn(5, num_qk + num_kv, head_dim, device=device).to(shape.dtype)
    angles = torch.rand(5, 1, head_dim // 2, device=device) * 6
    norm = torch.randn(num_qk, head_dim, device=device).to(shape.dtype) if has_norm else None

    wide = heads[:, :num_qk].float()
    if norm is not None:
        wide = rms_norm(wide, norm.float(), 1e-6)
    turned = rotate(wide, angles.cos(), angles.sin())
    written = torch.tensor([0, 1, 3, 4], device=device)
    expected = case.kv_pool.clone()
    ReferenceAttention().write_kv(
        expected,
        1,
        turned[written, shape.num_heads :].to(shape.dtype),
        heads[written, num_qk:],
        replace(case.batch, slot_mapping=case.batch.slot_mapping[written]),
    )
    slots = case.batch.slot_mapping.clone()
    slots[2] = -1
    found = case.kv_pool.clone()
    rotation = rows.Rotation(angles.cos(), angles.sin(), norm, 1e-6)
    query = rows.rotate_and_write(heads.flatten(1), rotation, slots, found, 1)

    tolerance = TOLERANCE[shape.dtype]
    near = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(query.float(), turned[:, : shape.num_heads], **near)
    torch.testing.assert_close(found, expected, **near, equal_nan=True)
    # Values are only moved, and nobody else's slots are touched: to the bit.
    found[:, 1, 0] = expected[:, 1, 0] = 0
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


def check_coded_writes(shape: Shape, device: torch.device) -> None:
    """Rows of codes, as plain torch makes them of the same numbers: values to the bit."""
    case = on(make_case(shape, [(4, 30), (1, 3)]), device)
    num_qk, head_dim = shape.num_heads + shape.num_kv_heads, shape.head_dim
    torch.manual_seed(3)
    heads = torch.randn(5, num_qk + shape.num_kv_heads, head_dim, device=device)
    heads[1] *= 1e4
    heads[2, -1] = 0
    heads[3, -1, 1] = torch.inf
    heads[4, -1, -1] = torch.nan
    heads = heads.to(shape.dtype)
    angles = torch.rand(5, 1, head_dim // 2, device=device) * 6
    turned = rotate(heads[:, :num_qk].float(), angles.cos(), angles.sin())
    expected, found = case.kv_pool.clone(), case.kv_pool.clone()
    ReferenceAttention().write_kv(
        expected, 1, turned[:, shape.num_heads :], heads[:, num_qk:].float(), case.batch
    )
    rotation = rows.Rotation(angles.cos(), angles.sin(), None, 1e-6)
    rows.rotate_and_write(heads.flatten(1), rotation, case.batch.slot_mapping, found, 1)
    assert torch.equal(found[:, :, 1], expected[:, :, 1])
    step = 0.07 if found.dtype is torch.uint8 else 0.01  # of codes that are rounded otherwise
    near = {"atol": 1e-2, "rtol": step}
    torch.testing.assert_close(decoded(found), decoded(expected), **near, equal_nan=True)
