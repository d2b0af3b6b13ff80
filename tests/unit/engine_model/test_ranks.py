"""Steps of several tensor-parallel ranks: the same tokens as transformers', and as one rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.engine.models.config import load_model_config
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.native.packed_folder import packed_files
from pdserve.engine.ranks.shard import check_ranks
from pdserve.errors import ConfigError, NodeSick
from pdserve.kv_layout import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.requests import make_request
from tests.unit.engine_model.harness import Node, make_prompt
from tests.unit.engine_model.ranked import ranked_node
from tests.unit.engine_model.reference import assert_node_matches
from tests.unit.engine_model.test_families import CASES

NUM_RANKS = {  # with 2 KV heads of 4: split by 2, replicated by 4
    "llama": 2,
    "llama tied": 4,
    "llama with one KV head": 2,
    "llama with biases": 2,
    "mistral with window": 4,
    "qwen2 tied": 2,
    "qwen3 with bias": 4,
    "qwen3 with windows": 2,
}
Make = Callable[..., Path]


@pytest.mark.parametrize(("case", "num_ranks"), NUM_RANKS.items(), ids=str)
def test_a_family_on_several_ranks_matches_transformers(
    checkpoint_of: Make, case: str, num_ranks: int
) -> None:
    family, overrides = CASES[case]
    path = checkpoint_of(family, **overrides)
    with ranked_node(path, num_ranks) as (node, _):
        assert_node_matches(path, node)


def test_vocabulary_and_inner_width_need_not_be_divisible(checkpoint_of: Make) -> None:
    path = checkpoint_of("llama", vocab_size=319, intermediate_size=99)
    with ranked_node(path, 2) as (node, _):
        assert_node_matches(path, node, 30, 6)


def test_tokens_of_a_batch_are_those_of_one_rank_and_its_bits_do_not_depend_on_the_batch(
    checkpoint_of: Make,
) -> None:
    path = checkpoint_of("llama")
    alone = Node.load(path)
    prompts = [make_prompt(length, seed=length) for length in (1, 15, 16, 17, 40, 130)]
    expected = [make_request(prompt) for prompt in prompts]
    alone.generate(expected, 12)
    with ranked_node(path, 2) as (node, _):
        found = [make_request(prompt) for prompt in prompts]
        node.generate(found, 12, chunk=23)
        assert [r.output_token_ids for r in found] == [r.output_token_ids for r in expected]
        together = node.logits(prompts[-1]).clone()
        assert torch.equal(node.logits(prompts[-1][:100]), together[:100])


def test_bfloat16_is_close(checkpoint_of: Make) -> None:
    path, prompt = checkpoint_of("llama"), make_prompt(60)
    expected = Node.load(path, dtype=KvDtype.BFLOAT16).logits(prompt)
    with ranked_node(path, 2, KvDtype.BFLOAT16) as (node, _):
        difference = (node.logits(prompt) - expected).abs()
    assert difference.mean() < 0.05 * expected.std()


def test_each_rank_packs_a_file_of_its_own(checkpoint_of: Make, tmp_path: Path) -> None:
    path, cache = checkpoint_of("llama"), PackedCache(tmp_path, 1 << 40, 10.0)
    with ranked_node(path, 2, cache=cache) as (node, _):
        first = node.logits(make_prompt(9)).clone()
    names = [file.path.name for file in packed_files(tmp_path)]
    assert sorted(name.count("rank0of2") for name in names) == [0, 1], names
    with ranked_node(path, 2, cache=cache) as (node, _):
        assert torch.equal(node.logits(make_prompt(9)), first)


@pytest.mark.parametrize("is_computing", [False, True], ids=["idle", "in steps"])
def test_a_killed_rank_ends_the_steps_of_the_others(
    checkpoint_of: Make, is_computing: bool
) -> None:
    with ranked_node(checkpoint_of("llama"), 4) as (node, ranks):
        node.logits(make_prompt(9))
        if not is_computing:
            os.kill(ranks.pids[1], signal.SIGKILL)
            ranks._watcher.join(5.0)  # it ends with the last one of them
            assert not ranks._watcher.is_alive()
        else:
            os.kill(ranks.pids[1], signal.SIGSTOP)  # so that the step cannot end before it
            threading.Timer(0.05, os.kill, (ranks.pids[1], signal.SIGKILL)).start()
        started_s = time.monotonic()
        with pytest.raises(NodeSick):
            node.logits(make_prompt(9))
        assert time.monotonic() - started_s < 5.0, "there was no sign of it but its silence"
        assert f"rank 2 of 4 (process {ranks.pids[1]}) was killed by signal 9" in ranks.lost
    for pid in ranks.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("num_ranks", [3, 8])
def test_heads_that_cannot_be_divided_are_refused(checkpoint_of: Make, num_ranks: int) -> None:
    config = load_model_config(resolve_checkpoint(str(checkpoint_of("llama"))))
    with pytest.raises(ConfigError, match="can be divided among 1, 2, 4 ranks"):
        check_ranks(config, num_ranks)
