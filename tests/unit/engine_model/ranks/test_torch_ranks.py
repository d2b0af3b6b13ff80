"""Ranks that torch computes, as on GPUs, here by gloo: the tokens of transformers, and of one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.config import load_model_config
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.plan.forms import ActivationDtype
from pdserve.engine.ranks import process_group
from pdserve.engine.ranks.process_group import GroupCollectives, join_ranks
from pdserve.engine.ranks.shard import Shard
from pdserve.engine.ranks.sizes import Parallelism
from pdserve.engine.request import Scheduled
from pdserve.engine.weights.load import load_torch_weights
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.shared.errors import NodeSick
from pdserve.shared.pooling import Pooling
from tests.matrix import matrix
from tests.native_attention import writing_attention
from tests.plans import plan_in
from tests.reference import Reference
from tests.requests import make_request, work_of
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt
from tests.unit.engine_model.models.test_families import CASES
from tests.unit.engine_model.reference import assert_node_matches
from tests.unit.engine_model.threaded_ranks import CPU, threaded_node

F32 = ActivationDtype.FLOAT32

DIVIDED = {  # ranks, and stages; with 2 KV heads of 4: split by 2, replicated by 4
    "olmo2 with bias": (4, 1),  # a norm is of all ranks' heads
    "qwen3 moe with MLPs": (2, 2),
    "mistral with window": (4, 1),
    "qwen2 with windows": (1, 2),
    "llama": (2, 1),
    "llama tied": (4, 1),
    "llama with one KV head": (2, 2),
    "llama with biases": (4, 1),
    "qwen2 tied": (2, 2),
    "qwen3 with bias": (4, 1),
    "qwen3 with windows": (2, 2),
    "phi3 partial": (2, 2),
    "qwen2 moe with MLPs": (2, 2),
    "gemma2": (2, 2),
    "gpt-oss": (4, 1),
    "gemma3": (4, 1),
    "cohere2": (2, 2),
    "granite with biases": (2, 2),
    "glm4": (4, 1),
    "smollm3": (2, 2),
    "olmo2": (2, 1),
    "olmo3": (2, 2),
    "mixtral": (4, 1),
}
LEAST_PART = 8  # rows: stages compute all but the smallest steps in parts
Make = Callable[..., Path]


def torch_decoder(config, weights, ranks):
    return TorchDecoder(config, weights, writing_attention(CPU), ranks, LEAST_PART)


@pytest.mark.parametrize(("case", "divided"), matrix(DIVIDED.items(), 2), ids=str)
def test_a_family_on_several_ranks_matches_transformers(
    checkpoint_of: Make, case: str, divided: tuple[int, int]
) -> None:
    family, overrides = CASES[case]
    path, (num_ranks, num_stages) = checkpoint_of(family, **overrides), divided
    with threaded_node(path, num_ranks, torch_decoder, num_stages=num_stages) as (node, _):
        assert_node_matches(path, node, 100, 8)


@pytest.mark.parametrize(
    "divided", matrix([(one,) for one in [(2, 1), (4, 1), (1, 3), (2, 2)]], 1), ids=str
)
def test_tokens_of_a_batch_are_those_of_one_rank(
    checkpoint_of: Make, divided: tuple[int, int]
) -> None:
    """The vocabulary, the inner width and the layers cannot be divided evenly."""
    path = checkpoint_of("llama", vocab_size=319, intermediate_size=99, num_hidden_layers=5)
    num_ranks, num_stages = divided
    prompts = [make_prompt(length, seed=length) for length in (1, 15, 16, 17, 40)]
    expected = [make_request(prompt) for prompt in prompts]
    Node.load(path, DecoderKind.TORCH).generate(expected, 12)
    found = [make_request(prompt) for prompt in prompts]
    with threaded_node(path, num_ranks, torch_decoder, num_stages=num_stages) as (node, _):
        node.generate(found, 12, chunk=23)
    assert [r.output_token_ids for r in found] == [r.output_token_ids for r in expected]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_embeddings_are_those_of_one_rank(checkpoint_of: Make, num_stages: int) -> None:
    path, prompt = checkpoint_of("llama"), make_prompt(60)
    expected = Reference(path).states(prompt).mean(dim=0)
    with threaded_node(path, 2, torch_decoder, num_stages=num_stages) as (node, _):
        request = make_request(prompt, max_tokens=0, pooling=Pooling.MEAN)
        node.step([Scheduled(request, len(prompt))])
    found = torch.frombuffer(bytearray(work_of(request).embedding), dtype=torch.float32)
    assert torch.nn.functional.cosine_similarity(found, expected, dim=0) > 1 - 1e-5


def test_bfloat16_is_close(checkpoint_of: Make) -> None:
    path, prompt = checkpoint_of("llama"), make_prompt(60)
    expected = Node.load(path, DecoderKind.TORCH, dtype=KvDtype.BFLOAT16).logits(prompt)
    with threaded_node(path, 2, torch_decoder, dtype=KvDtype.BFLOAT16) as (node, _):
        difference = (node.logits(prompt) - expected).abs()
    assert difference.mean() < 0.05 * expected.std()


def test_two_sums_a_layer_one_of_embeddings_and_one_gather_a_step(checkpoint_of: Make) -> None:
    with threaded_node(checkpoint_of("llama", num_hidden_layers=3), 2, torch_decoder) as found:
        node, ranks = found
        node.logits(make_prompt(9))
        request = make_request(make_prompt(9))
        node.step([Scheduled(request, 4)])  # samples nothing
    expected = [*["all_reduce"] * 7, "gather", *["all_reduce"] * 7]
    assert [rank.calls for rank in ranks] == [expected, expected]


def test_stages_hand_on_what_they_compute_and_the_last_one_answers(checkpoint_of: Make) -> None:
    path = checkpoint_of("llama", num_hidden_layers=2)
    with threaded_node(path, 2, torch_decoder, num_stages=2) as (node, ranks):
        node.logits(make_prompt(9))
        found = [rank.calls.copy() for rank in ranks]
        for rank in ranks:
            rank.calls.clear()
        node.step([Scheduled(make_request(make_prompt(9)), 4)])  # samples nothing
        signed = [rank.calls for rank in ranks]
    embedding, layer = ["all_reduce"], ["all_reduce"] * 2
    first, last = [*embedding, *layer, "send"], ["receive", *layer]
    assert found == [[*first, "receive"], first, [*last, "gather", "send"], [*last, "gather"]]
    assert signed == [[*first, "receive"], first, [*last, "send"], last]


def test_stages_compute_different_parts_of_a_step(checkpoint_of: Make) -> None:
    """Each is handed on as soon as it is computed, and the answer comes behind all of them."""
    path = checkpoint_of("llama", num_hidden_layers=2)
    with threaded_node(path, 1, torch_decoder, num_stages=2) as (node, ranks):
        node.step([Scheduled(make_request(make_prompt(30)), 30)])
    layer = ["all_reduce"] * 2  # of one rank, so there is nothing to add
    first, last = [*layer, "send"] * 3, ["receive", *layer] * 3
    assert [rank.calls for rank in ranks] == [[*first, "receive"], [*last, "send"]]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_all_stages_have_written_the_layers_that_are_reported(
    checkpoint_of: Make, num_stages: int
) -> None:
    path = checkpoint_of("llama", num_hidden_layers=5)  # stages of 2 and 3
    request, told = make_request(make_prompt(20)), []
    request.block_table = [7, 3]
    with threaded_node(path, 2, torch_decoder, num_stages=num_stages) as (node, _):
        pools = [kv_cache.pool for kv_cache in node.runner._model._pools]

        def on_done(num_layers: int) -> None:
            heads = [
                torch.cat([pool[7] for pool in pools[rank::2]]).isfinite() for rank in range(2)
            ]  # [num_layers, 2, heads of the rank, block_size, head_dim]
            told.append((num_layers, [bool(own[:num_layers].all()) for own in heads]))

        node.runner.execute([Scheduled(request, 20)], LayerProgress([1, 3, 4], on_done))
    assert told == [(end, [True, True]) for end in (1, 3, 4)]


@pytest.mark.parametrize("family", ["llama with biases", "qwen2 tied"])
def test_stages_have_each_part_of_the_weights_once(checkpoint_of: Make, family: str) -> None:
    """A tied embedding is in the first stage, and as the output matrix in the last."""
    name, overrides = CASES[family]
    checkpoint = resolve_checkpoint(str(checkpoint_of(name, **overrides)))
    config = load_model_config(checkpoint)
    names = []
    for stage in range(2):
        shard = Shard(0, 1, stage, 2)
        weights = load_torch_weights(checkpoint, plan_in(config, torch.float32, shard), F32, CPU)
        names += weights.slots
        assert len(weights.layers) == len(shard.layers(config)) < config.num_layers
    whole = load_torch_weights(checkpoint, plan_in(config, torch.float32), F32, CPU)
    twice = ["model.embed_tokens.weight"] if config.ties_embeddings else []
    assert sorted(names) == sorted([*whole.slots, *twice])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_have_each_part_of_the_weights_once(checkpoint_of: Make, num_ranks: int) -> None:
    """KV heads are there once, or as often as they are replicated; biases of sums on rank 0."""
    family, overrides = CASES["llama with biases"]
    checkpoint = resolve_checkpoint(str(checkpoint_of(family, **overrides)))
    config = load_model_config(checkpoint)
    sizes: dict[str, int] = {}
    whole = load_torch_weights(checkpoint, plan_in(config, torch.float32), F32, CPU)
    for rank in range(num_ranks):
        shard = Shard(rank, num_ranks)
        weights = load_torch_weights(checkpoint, plan_in(config, torch.float32, shard), F32, CPU)
        for name, slot in weights.slots.items():
            sizes[name] = sizes.get(name, 0) + slot.destination.numel()
    for name, slot in whole.slots.items():
        is_replicated = "k_proj" in name or "v_proj" in name
        factor = max(1, num_ranks // config.num_kv_heads) if is_replicated else 1
        factor = num_ranks if "norm" in name else factor
        assert sizes[name] == factor * slot.destination.numel(), name


def joined(num_ranks: int, num_stages: int = 1) -> list[GroupCollectives]:
    parallelism, store = Parallelism(num_ranks, num_stages), HashStore()
    shards = [Shard.of_rank(rank, parallelism) for rank in range(parallelism.num_ranks)]
    with ThreadPoolExecutor(len(shards)) as threads:
        return list(threads.map(lambda s: join_ranks(store, s, CPU, lambda: None), shards))


def test_rank_0_chooses_for_all() -> None:
    ranks = joined(2, 2)
    with ThreadPoolExecutor(len(ranks)) as threads:
        chosen = threads.map(lambda one: one.agree("a word", lambda: str(one.shard)), ranks)
    assert list(chosen) == [str(ranks[0].shard)] * 4


def test_nobody_waits_for_ever_for_what_rank_0_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "AGREE_S", 0.05)
    _, other = joined(2)
    with pytest.raises(NodeSick, match="rank_lost"):
        other.agree("a word", lambda: "not this rank's to choose")
