"""The KV pool of a GPU: what weights and the worst step leave of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pdserve.commands.bench.checkpoints.random_checkpoint import config_of
from pdserve.commands.bench.checkpoints.shapes import SHAPES
from pdserve.engine.cuda.attention.split_keys import partial_bytes
from pdserve.engine.models.config import ModelConfig, parse_model_config
from pdserve.engine.models.families import PRE_NORMS
from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.parameters import allocate_weights
from pdserve.engine.plan.forms import ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.plan.sizes import weight_bytes
from pdserve.engine.ranks.shard import WHOLE, Shard
from pdserve.engine.steps.worst import LargestStep
from pdserve.node.memory.device_budget import GRAPH_BYTES, gpu_kv_bytes, step_bytes
from pdserve.node.start.model import plan_model
from pdserve.settings.config import EngineConfig, NodeConfig
from pdserve.shared.errors import ConfigError
from tests.fakes.cards import show_cards

GIB = 1 << 30
BF16 = ActivationDtype.BFLOAT16


def llama_8b() -> ModelConfig:
    """The shape of Llama-3.1-8B."""
    demo = plan_model(NodeConfig(engine=EngineConfig(device="cpu"))).config
    return dataclasses.replace(
        demo,
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        norms=PRE_NORMS,
        ties_embeddings=False,
        sliding_windows=(None,) * 32,
        ropes=demo.ropes[:1] * 32,
        max_model_len=131_072,
    )


QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "mlp_only_layers": [0],
}


@pytest.mark.parametrize("fields", [{}, QWEN3, {"tie_word_embeddings": True}], ids=str)
@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2), Shard(0, 1, 1, 2)], ids=str)
def test_weights_are_counted_without_being_allocated(fields: dict[str, Any], shard: Shard) -> None:
    shape = config_of(SHAPES["demo-14m"]) | fields
    plan = ModelPlan.of(parse_model_config(JsonFields(shape, "small")), shard)
    slots = allocate_weights(plan, torch.bfloat16, torch.device("cpu")).slots
    assert weight_bytes(plan, BF16) == sum(slot.destination.nbytes for slot in slots.values())


@pytest.mark.parametrize(
    ("name", "num_weights"),
    [("8x7b", 46.7e9), ("30b-a3b", 30.5e9), ("70b", 70.6e9), ("8b", 8.03e9)],
)
def test_all_experts_count(name: str, num_weights: float) -> None:
    model = parse_model_config(JsonFields(config_of(SHAPES[name]), name))
    assert weight_bytes(ModelPlan.of(model), BF16) == pytest.approx(2 * num_weights, rel=0.01)


def test_a_step_has_rows_for_each_expert_that_a_token_chooses() -> None:
    few, many = (
        parse_model_config(
            JsonFields(config_of(SHAPES["30b-a3b"] | {"num_experts_per_tok": chosen}), "30b-a3b")
        )
        for chosen in (4, 8)
    )
    step = LargestStep(8192, 256)
    # Gate, up and their product, and the result in float32; also where pieces are captured.
    extra_bytes = 4 * (8192 + 2048) * (3 * 768 * 2 + 2048 * 4)
    assert step_bytes(many, BF16, step) - step_bytes(few, BF16, step) == extra_bytes


@pytest.mark.parametrize(("size_gib", "num_contexts"), [(24, 0), (80, 3), (139, 6)])
def test_cards_hold_what_their_owners_expect(size_gib: int, num_contexts: int) -> None:
    """Of whole contexts of 131,072 tokens, 16 GiB each."""
    model = llama_8b()
    left = gpu_kv_bytes(
        int(0.98 * size_gib) * GIB,
        size_gib * GIB,
        0.9,
        weight_bytes(ModelPlan.of(model), BF16),
        step_bytes(model, BF16, LargestStep(8192, 256)),
    )
    assert left // (16 * GIB) == num_contexts


def test_captured_pieces_have_memory_of_their_own_up_to_their_largest() -> None:
    """Of a hundred tokens more, a step takes as much for each, and pieces only below 2048."""
    below, above = (
        step_bytes(llama_8b(), BF16, LargestStep(tokens + 100, 1))
        - step_bytes(llama_8b(), BF16, LargestStep(tokens, 1))
        for tokens in (1000, 3000)
    )
    handed_on = 4096 * 4 + 2 * 32 * 128 * 2  # the residual; queries and their attention
    assert below == 2 * above + 100 * handed_on


def test_without_graphs_their_memory_is_for_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    model, step = llama_8b(), LargestStep(1000, 8)
    saved = step_bytes(model, BF16, step) - step_bytes(model, BF16, step, has_graphs=False)
    # As much as the launched step, and what pieces hand on: 4 bytes of the residual, 2 of heads.
    widest = 2 * 4096 + 3 * 14_336 + 4096
    assert saved == GRAPH_BYTES + 1000 * (widest * 2 + 4096 * 4 + 2 * 32 * 128 * 2)

    show_cards(monkeypatch, [78 * GIB])
    pools = [
        model.num_blocks * model.layout.block_bytes
        for model in (
            plan_model(NodeConfig(engine=EngineConfig(device="cuda", cuda_graphs=has_graphs)))
            for has_graphs in (False, True)
        )
    ]
    assert pools[0] - pools[1] > GRAPH_BYTES


def test_a_request_has_logits_and_what_its_row_attends_in_parts() -> None:
    """For each head, 16 programs have a float32 result of its width, and two numbers."""
    one, two = (step_bytes(llama_8b(), BF16, LargestStep(1000, number)) for number in (1, 2))
    assert two - one == 128_256 * 4 * 5 + 32 * 16 * (128 + 2) * 4


def test_latent_rows_are_attended_in_parts_as_wide_as_values() -> None:
    """Sixteen heads a program, so that of 128 there are 8 with 16 programs each."""
    assert partial_bytes(2, 128, 1, 576, 512) == 2 * 128 * 16 * (512 + 2) * 4


def test_a_node_knows_its_largest_step() -> None:
    engine = EngineConfig(device="cpu", token_budget=96, max_batch_size=7)
    assert plan_model(NodeConfig(engine=engine)).worst_step == LargestStep(96, 7)


def test_what_others_have_is_theirs() -> None:
    assert gpu_kv_bytes(10 * GIB, 80 * GIB, 0.9, 4 * GIB, GIB) == 5 * GIB
    assert gpu_kv_bytes(80 * GIB, 80 * GIB, 0.5, 4 * GIB, GIB) == 35 * GIB
    with pytest.raises(ConfigError, match=r"10240 MiB of 81920 MiB are free.*kv_utilization 0\.9"):
        gpu_kv_bytes(10 * GIB, 80 * GIB, 0.9, 10 * GIB, GIB)


def test_larger_steps_leave_less() -> None:
    model = llama_8b()
    sizes = [
        step_bytes(model, BF16, LargestStep(tokens, requests))
        for tokens, requests in ((512, 64), (8192, 64), (8192, 256))
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2] < 4 * GIB


def test_a_node_on_a_gpu_takes_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    show_cards(monkeypatch, [78 * GIB])
    engine = EngineConfig(device="cuda", kv_utilization=0.5)
    model = plan_model(NodeConfig(engine=engine))
    assert 30 * GIB < model.num_blocks * model.layout.block_bytes < 40 * GIB


def test_ranks_on_gpus_share_out_the_model_and_the_fullest_gpu_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    show_cards(monkeypatch, [0, 40 * GIB, 10 * GIB])
    model = plan_model(NodeConfig(engine=EngineConfig(device="cuda:1", tensor_parallel=2)))
    assert model.has_device_ranks
    assert [str(model.device_of_rank(rank)) for rank in range(2)] == ["cuda:1", "cuda:2"]
    assert [layout.num_kv_heads for layout in model.rank_layouts] == [1, 1]
    part_bytes = model.num_blocks * model.rank_layouts[1].block_bytes
    assert 7 * GIB < part_bytes < 10 * GIB


def test_the_stage_with_most_layers_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    show_cards(monkeypatch, [10 * GIB] * 6)
    engine = EngineConfig(device="cuda", tensor_parallel=2, pipeline_parallel=3)
    model = plan_model(NodeConfig(engine=engine))
    layers = [layout.num_layers for layout in model.rank_layouts]
    assert sum(layers[::2]) == model.layout.num_layers
    assert len(set(layers)) == 2
    largest = max(layout.block_bytes for layout in model.rank_layouts)
    assert 7 * GIB < model.num_blocks * largest < 10 * GIB


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "cuda:2"}, 'device "cuda:2": there are 2 GPUs'),
        ({"tensor_parallel": 4}, "4 ranks take cuda:0 to cuda:3, and there are 2 GPUs"),
        (
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            "4 ranks take cuda:0 to cuda:3, and there are 2 GPUs",
        ),
        (
            {"tensor_parallel": 6, "pipeline_parallel": 1, "rank_hosts": ["10.0.0.2:1"]},
            "3 ranks take cuda:0 to cuda:2, and there are 2 GPUs",
        ),
    ],
    ids=str,
)
def test_ranks_that_gpus_cannot_have_are_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str
) -> None:
    show_cards(monkeypatch, [78 * GIB] * 2)
    with pytest.raises(ConfigError, match=says):
        plan_model(NodeConfig(engine=EngineConfig(**{"device": "cuda"} | options)))
