"""A training run of two steps: everything happens, nothing is learned."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo_model import checkpoint_files, train
from tools.demo_model.train import TrainingPlan

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
PLAN = TrainingPlan(
    num_steps=2,
    tokens_per_step=64,
    vocab_size=300,
    num_tokenizer_documents=20,
    num_questions=1,
    max_new_tokens=4,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "checkpoint"
    train.train(PLAN, folder, SHAPE)
    return folder


@pytest.mark.long
def test_the_folder_loads_and_holds_no_more_than_bfloat16(trained):
    model = AutoModelForCausalLM.from_pretrained(trained, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(trained)) == 300
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.long
def test_the_evaluation_stands_beside_the_weights(trained):
    evaluation = json.loads((trained / "evaluation.json").read_text())
    assert evaluation["run"]["steps"] == 2
    assert evaluation["plan"]["seed"] == PLAN.seed
    assert set(evaluation["held_out_accuracy"]) >= {"addition", "story", "capitals"}


@pytest.mark.long
def test_the_same_seed_trains_the_same_model(trained, tmp_path):
    train.train(PLAN, tmp_path, SHAPE)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()


def test_the_learning_rate_rises_and_falls():
    plan = TrainingPlan(num_steps=1000, warmup_steps=10, peak_rate=1.0)
    rates = [train.learning_rate(plan, step, step / 1000) for step in range(1000)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert max(rates) == pytest.approx(1.0, abs=1e-3)
    assert 0 < rates[-1] < 0.05


@pytest.mark.long
def test_rounding_leaves_what_the_checkpoint_holds(trained):
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoint_files.round_to_bfloat16(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.long
def test_time_can_end_a_run_early(tmp_path):
    plan = TrainingPlan(
        num_steps=10**9,
        limit_s=0.2,
        tokens_per_step=64,
        vocab_size=300,
        num_tokenizer_documents=20,
        num_questions=1,
        max_new_tokens=4,
    )
    train.train(plan, tmp_path, SHAPE)
    run = json.loads((tmp_path / "evaluation.json").read_text())["run"]
    assert 0 < run["steps"] < 10**9
    assert not math.isnan(run["loss"])
