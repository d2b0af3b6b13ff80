"""Floors of steps: against counts made by hand, and by one rule: more work never costs less."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.commands.bench.step.floor import Limit, Rates, StepWork, Work
from pdserve.engine.models.config import ModelConfig, parse_model_config
from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.plan.forms import BFLOAT16, FLOAT32, INT8, ActivationDtype, WeightForm
from pdserve.engine.plan.model import ModelPlan
from pdserve.kv import KvDtype
from pdserve.measured.perf_model import StepRow


def parsed(num_layers: int = 2, **changes: object) -> ModelConfig:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    return parse_model_config(JsonFields(fields | changes, "test"))


def tiny(num_layers: int = 2, **changes: object) -> ModelConfig:
    return dataclasses.replace(parsed(num_layers), **changes)


def work_of(model: ModelConfig, form: WeightForm = BFLOAT16) -> StepWork:
    """Everything that is not quantised in the type of weights, or in bfloat16."""
    dtype = ActivationDtype.BFLOAT16 if form.is_quantised else ActivationDtype(form.name)
    plan = ModelPlan.of(model, form=form)
    return StepWork(plan, dtype, KvDtype(dtype))


KV, REST, OUTPUT = 2 * 4 * 8, 2 * 8 * 8 + 3 * 12 * 8, 100 * 8  # weights of `tiny`
TOKEN_BYTES = 2 * 4 * 2  # keys and values of a layer in bfloat16


def test_a_decode_step_by_hand() -> None:
    work = work_of(tiny()).of([StepRow(1, 9, True), StepRow(1, 4, True)])
    weights = 2 * (KV + REST) + OUTPUT
    assert work.num_bytes == 2 * weights + 2 * 8 * 2 + 2 * (10 + 5) * TOKEN_BYTES + 2 * 100 * 4
    assert work.num_flops == 2 * weights * 2 + 4 * 4 * 2 * 2 * (10 + 5)


def test_a_state_is_read_however_long_the_context() -> None:
    """Two layers have one: of two heads, each 3 x 5. One token of 16 writes it."""
    hybrid = parsed(
        3,
        architectures=["Qwen3NextForCausalLM"],
        full_attention_interval=3,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=3,
        linear_value_head_dim=5,
        linear_conv_kernel_dim=3,
        num_experts=0,
        partial_rotary_factor=0.5,
    )
    state = 2 * 2 * 3 * 5
    short, long, two = (
        work_of(hybrid).of([StepRow(1, before, True)] * count)
        for before, count in ((9, 1), (109, 1), (9, 2))
    )
    assert long.num_bytes - short.num_bytes == 100 * TOKEN_BYTES, "one layer has keys and values"
    assert long.num_flops - short.num_flops == 4 * 4 * 2 * 100
    of_row = 8 * 2 + 10 * TOKEN_BYTES + 100 * 4
    assert two.num_bytes - short.num_bytes == of_row + state * 4 + state * 4 // 16
    assert two.num_flops > short.num_flops + 6 * state


def test_the_last_layer_of_a_prompt_is_wanted_of_its_last_token_only() -> None:
    work = work_of(tiny()).of([StepRow(6, 0)])
    products = 6 * (KV + REST) + 6 * KV + REST + OUTPUT
    pairs = (1 + 2 + 3 + 4 + 5 + 6) + 6
    assert work.num_flops == 2 * products + 4 * 4 * 2 * pairs


def test_windows_bound_what_is_seen() -> None:
    model = tiny(sliding_windows=(3, None))
    work = work_of(model)
    full = work_of(tiny())
    rows = [StepRow(2, 8)]
    # Of ten keys, two queries see the last four through a window of three, three each.
    assert full.of(rows).num_bytes - work.of(rows).num_bytes == (10 - 4) * TOKEN_BYTES
    assert full.of(rows).num_flops - work.of(rows).num_flops == 4 * 4 * 2 * (9 + 10 - 3 - 3)


def test_experts_that_some_row_chooses() -> None:
    fields = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "mlp_only_layers": [0],
        "head_dim": 4,
    }
    work = work_of(parsed(**fields))
    attention, mlp, expert, router = 2 * 8 * 8, 3 * 12 * 8, 3 * 6 * 8, 4 * 8
    dense = 2 * (KV + attention) + mlp + OUTPUT
    for num_rows, num_read in ((1, 2), (2, 3), (3, 3.5)):  # a row misses half of them
        found = work.of([StepRow(1, 0, True)] * num_rows)
        others = num_rows * (8 * 2 + 2 * TOKEN_BYTES + 100 * 4)
        assert found.num_bytes == 2 * (dense + num_read * expert) + 4 * router + others
        assert found.num_flops == num_rows * (2 * (dense + router + 2 * expert) + 2 * 4 * 4 * 2)


def test_types_of_weights() -> None:
    rows = [StepRow(1, 0, True)]
    bf16 = work_of(tiny()).of(rows)
    int8 = work_of(tiny(), INT8).of(rows)
    float32 = work_of(tiny(), FLOAT32).of(rows)
    weights = 2 * (KV + REST) + OUTPUT
    scales = 4 * (2 * (8 + 8 + 8 + 24 + 8) + 100)
    assert bf16.num_bytes - int8.num_bytes == weights - scales
    assert float32.num_bytes - 400 == 2 * (bf16.num_bytes - 400)  # logits are float32 in any case
    assert bf16.num_flops == int8.num_flops == float32.num_flops


def test_the_floor_is_the_larger_of_both_times() -> None:
    rates = Rates(bytes_per_s=10.0, flops_per_s=100.0)
    assert rates.floor_s(Work(20, 100)) == 2.0
    assert rates.limit(Work(20, 100)) is Limit.MEMORY
    assert rates.floor_s(Work(20, 300)) == 3.0
    assert rates.limit(Work(20, 300)) is Limit.ARITHMETIC


SIZES = st.tuples(st.integers(1, 40), st.integers(0, 40), st.booleans())


@given(st.lists(SIZES, min_size=1, max_size=6), st.integers(1, 50), st.integers(0, 5))
def test_more_to_do_is_never_less_work(
    sizes: list[tuple[int, int, bool]], window: int, number: int
) -> None:
    model = tiny(num_layers=3, sliding_windows=(window, None, window))
    work = work_of(model)
    rows = [StepRow(length, before, length == 1, sampled) for length, before, sampled in sizes]
    rows.append(StepRow(1, 3, True))  # sampled
    fewer = work.of(rows)
    index = number % len(rows)
    longer = [*rows]
    longer[index] = rows[index]._replace(num_before=rows[index].num_before + 1)
    for more in (work.of([*rows, StepRow(1, 0)]), work.of(longer)):
        assert more.num_bytes >= fewer.num_bytes
        assert more.num_flops >= fewer.num_flops


def test_a_step_that_samples_nothing_has_no_floor() -> None:
    with pytest.raises(AssertionError):
        work_of(tiny()).of([StepRow(4, 0, is_sampled=False)])
