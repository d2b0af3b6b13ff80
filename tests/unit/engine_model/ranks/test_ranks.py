"""Steps of several ranks and stages: the same tokens as transformers', and as one rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve import _native
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.config import load_model_config
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.native.packed_folder import packed_files
from pdserve.engine.ranks.process import MAPPED
from pdserve.engine.ranks.processes import RankProcesses
from pdserve.engine.ranks.shard import check_ranks
from pdserve.engine.ranks.sizes import Parallelism, memory_bytes
from pdserve.engine.request import Scheduled
from pdserve.engine.steps.batch import Taps
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.shared.errors import ConfigError, NodeSick
from pdserve.shared.pooling import Pooling
from tests.forked_rank import ForkedRank
from tests.matrix import matrix
from tests.plain_batch import build_batch
from tests.reference import Reference
from tests.requests import make_request, work_of
from tests.unit.engine_model.harness import Node, make_prompt, moved
from tests.unit.engine_model.latent_models import LATENT
from tests.unit.engine_model.models.test_families import CASES
from tests.unit.engine_model.models.test_recurrent import CASES as RECURRENT_CASES
from tests.unit.engine_model.ranks.ranked import ranked_node
from tests.unit.engine_model.reference import assert_node_matches

TENSOR, STAGES, BOTH = Parallelism(2), Parallelism(pipeline=2), Parallelism(2, 2)
DIVIDED = {  # with 2 KV heads of 4: split by 2, replicated by 4
    "olmo2": Parallelism(4),  # a norm is of all ranks' heads
    "v3": BOTH,  # latent rows are of all ranks
    "qwen3 moe with MLPs": BOTH,
    "mistral with window": Parallelism(4),
    "qwen2 with windows": Parallelism(pipeline=3),
    "llama": BOTH,
    "llama tied": Parallelism(4),
    "llama with one KV head": BOTH,
    "llama with biases": TENSOR,
    "mistral": STAGES,
    "qwen2 tied": STAGES,
    "qwen3 with bias": Parallelism(4),
    "qwen3 with windows": BOTH,
    "phi3 partial": BOTH,
    "qwen2 moe with MLPs": BOTH,
    "gemma2": TENSOR,
    "gpt-oss": BOTH,
    "gemma3": BOTH,
    "cohere2": BOTH,
    "granite with biases": BOTH,
    "glm4": Parallelism(4),
    "smollm3": BOTH,
    "olmo2 with bias": TENSOR,
    "olmo3": BOTH,
    "mixtral": Parallelism(4),
    "v2": Parallelism(4),
    "of a full layer between": TENSOR,  # groups with a state are divided, too
}
Make = Callable[..., Path]


@pytest.mark.parametrize(("case", "parallelism"), matrix(DIVIDED.items(), 3), ids=str)
def test_a_family_on_several_ranks_matches_transformers(
    checkpoint_of: Make, case: str, parallelism: Parallelism
) -> None:
    known = {name: ("qwen3_next", sizes) for name, sizes in RECURRENT_CASES.items()}
    family, overrides = (CASES | LATENT | known)[case]
    path = checkpoint_of(family, **overrides)
    with ranked_node(path, parallelism) as (node, _):
        assert_node_matches(path, node)


def test_vocabulary_and_inner_width_need_not_be_divisible(checkpoint_of: Make) -> None:
    path = checkpoint_of("llama", vocab_size=319, intermediate_size=99)
    with ranked_node(path, TENSOR) as (node, _):
        assert_node_matches(path, node, 30, 6)


@pytest.mark.parametrize("parallelism", matrix([BOTH, TENSOR, STAGES], 1), ids=str)
def test_tokens_of_a_batch_are_those_of_one_rank_and_its_bits_do_not_depend_on_the_batch(
    checkpoint_of: Make, parallelism: Parallelism
) -> None:
    path = checkpoint_of("llama")
    alone = Node.load(path)
    prompts = [make_prompt(length, seed=length) for length in (1, 15, 16, 17, 40, 130)]
    expected = [make_request(prompt) for prompt in prompts]
    alone.generate(expected, 12)
    with ranked_node(path, parallelism) as (node, _):
        found = [make_request(prompt) for prompt in prompts]
        node.generate(found, 12, chunk=23)
        assert [r.output_token_ids for r in found] == [r.output_token_ids for r in expected]
        together = node.logits(prompts[-1]).clone()
        assert torch.equal(node.logits(prompts[-1][:100]), together[:100])


def test_states_do_not_tell_how_many_ranks_made_them(checkpoint_of: Make) -> None:
    """A stream goes on with what one rank has begun, and the other way."""
    path, prompt = checkpoint_of("qwen3_next"), make_prompt(70)
    alone = Node.load(path)
    expected = make_request(prompt)
    alone.generate([expected], 20)
    with ranked_node(path, TENSOR) as (ranked, _):
        for first, then in ((alone, ranked), (ranked, alone)):
            request = make_request(prompt)
            first.step([Scheduled(request, 50)])
            moved(request, first, then)
            then.generate([request], 20)
            assert request.output_token_ids == expected.output_token_ids


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_groups_with_a_state_limit_the_ranks(checkpoint_of: Make, num_ranks: int) -> None:
    path = checkpoint_of("qwen3_next", num_attention_heads=12, num_key_value_heads=2)
    config = load_model_config(resolve_checkpoint(str(path)))
    with pytest.raises(ConfigError, match=r"2 groups with a state, can be .* among 1, 2 ranks"):
        check_ranks(config, Parallelism(num_ranks))


def test_stages_have_the_bits_of_one(checkpoint_of: Make) -> None:
    path, prompt = checkpoint_of("llama", num_hidden_layers=5), make_prompt(300)
    expected = Node.load(path).logits(prompt)
    with ranked_node(path, Parallelism(pipeline=3)) as (node, _):
        assert torch.equal(node.logits(prompt), expected)


@pytest.mark.parametrize("parallelism", matrix([STAGES, BOTH], 1), ids=str)
def test_layers_of_later_stages_are_reported_when_their_kv_is_written(
    checkpoint_of: Make, parallelism: Parallelism
) -> None:
    path, num_tokens = checkpoint_of("llama", num_hidden_layers=4), 300  # three parts of the step
    written: list[tuple[int, torch.Tensor]] = []
    with ranked_node(path, parallelism) as (node, _):
        request = make_request(make_prompt(num_tokens))
        request.block_table = [node.free.pop() for _ in range(19)]
        pool = node.kv_cache.pool

        def done(num_layers: int) -> None:
            # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], of NaN until written
            written.append((num_layers, pool[request.block_table[:18]].clone()))

        node.runner.execute([Scheduled(request, num_tokens)], LayerProgress([1, 2, 3, 4], done))
    assert [num_layers for num_layers, _ in written] == [1, 2, 3, 4]
    for num_layers, then in written:
        assert not then[:, :num_layers].isnan().any()


@pytest.mark.parametrize("pooling", matrix([Pooling.MEAN, Pooling.LAST], 1))
def test_embeddings_come_from_the_last_stage(checkpoint_of: Make, pooling: Pooling) -> None:
    path = checkpoint_of("llama")
    prompt = make_prompt(300)
    states = Reference(path).states(prompt)
    expected = states[-1] if pooling is Pooling.LAST else states.mean(dim=0)
    for parallelism in (TENSOR, STAGES, BOTH):
        with ranked_node(path, parallelism) as (node, _):
            request = make_request(prompt, max_tokens=0, pooling=pooling)
            node.step([Scheduled(request, len(prompt))])
        found = torch.frombuffer(bytearray(work_of(request).embedding), dtype=torch.float32)
        cosine = torch.nn.functional.cosine_similarity(found, expected, dim=0)
        assert cosine > 1 - 1e-5, parallelism


@torch.inference_mode()
@pytest.mark.parametrize("parallelism", matrix([BOTH, TENSOR], 1), ids=str)
def test_rows_before_layers_come_from_all_stages(
    checkpoint_of: Make, parallelism: Parallelism
) -> None:
    """Layers 0 and 1 are in one stage, 2 and 3 in the next; rows are in several parts of a step."""
    path, prompt = checkpoint_of("llama", num_hidden_layers=4), make_prompt(300)
    layers, rows = [3, 0, 2], torch.tensor([4, 127, 128, 299])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    with ranked_node(path, parallelism) as (node, _):
        request = make_request(prompt, block_table=list(range(5, 30)))
        batch = build_batch([Scheduled(request, len(prompt))], 16, torch.device("cpu"))
        taps = Taps(torch.tensor(layers), torch.full((len(rows), 3, 64), torch.nan))
        batch = replace(batch, sampled_rows=rows, taps=taps)
        node.model.logits(batch, node.kv_cache.pool)
    expected = torch.stack([states[layer][0, rows] for layer in layers], dim=1)
    torch.testing.assert_close(taps.out, expected, atol=2e-3, rtol=2e-3)


def test_bfloat16_is_close(checkpoint_of: Make) -> None:
    path, prompt = checkpoint_of("llama"), make_prompt(60)
    expected = Node.load(path, dtype=KvDtype.BFLOAT16).logits(prompt)
    with ranked_node(path, BOTH, KvDtype.BFLOAT16) as (node, _):
        difference = (node.logits(prompt) - expected).abs()
    assert difference.mean() < 0.05 * expected.std()


def test_each_rank_packs_a_file_of_its_own(checkpoint_of: Make, tmp_path: Path) -> None:
    path, cache = checkpoint_of("llama"), PackedCache(tmp_path, 1 << 40, 10.0)
    with ranked_node(path, BOTH, cache=cache) as (node, _):
        first = node.logits(make_prompt(9)).clone()
    names = [file.path.name for file in packed_files(tmp_path)]
    assert len(names) == 4
    assert sorted(name.count("rank0of2-stage1of2") for name in names) == [0, 0, 0, 1], names
    with ranked_node(path, BOTH, cache=cache) as (node, _):
        assert torch.equal(node.logits(make_prompt(9)), first)


def _follow(memory_fd: int, mapped_fd: int) -> None:
    """A rank that touches all of the memory, until its last byte tells it to end."""
    memory = _native.map_shared(memory_fd, memory_bytes((2,)), writable=True)
    os.write(mapped_fd, MAPPED)
    while not memory[-1]:
        memory.sum()
    os._exit(memory[-1])


@pytest.mark.long
def test_the_memory_of_ranks_cannot_be_cut_under_them() -> None:
    kept: list[int] = []

    def start(rank: int, memory_fd: int) -> ForkedRank:
        kept.append(os.dup(memory_fd))
        return ForkedRank(partial(_follow, memory_fd), [memory_fd])

    ranks = RankProcesses((2,), start)
    try:
        ranks.wait_mapped()
        with pytest.raises(PermissionError):
            os.truncate(kept[0], 0)
        assert not ranks.memory[-1]
        ranks.memory[-1] = 7
        ranks._watcher.join(30.0)
        assert ranks.lost.endswith("ended with 7")  # and not by a signal
    finally:
        os.close(kept[0])
        ranks.close()


@pytest.mark.parametrize("is_computing", [False, True], ids=["idle", "in steps"])
def test_a_killed_rank_ends_the_steps_of_the_others(
    checkpoint_of: Make, is_computing: bool
) -> None:
    with ranked_node(checkpoint_of("llama"), BOTH) as (node, ranks):
        node.logits(make_prompt(9))
        if not is_computing:
            os.kill(ranks.pids[1], signal.SIGKILL)
            ranks._watcher.join(30.0)  # it ends with the last one of them
            assert not ranks._watcher.is_alive()
        else:
            os.kill(ranks.pids[1], signal.SIGSTOP)  # so that the step cannot end before it
            threading.Timer(0.05, os.kill, (ranks.pids[1], signal.SIGKILL)).start()
        started_s = time.monotonic()
        with pytest.raises(NodeSick):
            node.logits(make_prompt(9))
        assert time.monotonic() - started_s < 30.0, "there was no sign of it but its silence"
        assert f"rank 2 of 4 (process {ranks.pids[1]}) was killed by signal 9" in ranks.lost
    for pid in ranks.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("num_ranks", [3, 8])
def test_heads_that_cannot_be_divided_are_refused(checkpoint_of: Make, num_ranks: int) -> None:
    config = load_model_config(resolve_checkpoint(str(checkpoint_of("llama"))))
    with pytest.raises(ConfigError, match="can be divided among 1, 2, 4 ranks"):
        check_ranks(config, Parallelism(num_ranks))


def test_more_stages_than_layers_are_refused(checkpoint_of: Make) -> None:
    config = load_model_config(resolve_checkpoint(str(checkpoint_of("llama"))))
    with pytest.raises(ConfigError, match="pipeline_parallel 3: the model has 2 layers"):
        check_ranks(config, Parallelism(pipeline=3))
