"""Adapters that PEFT has saved, against PEFT itself: logits of one prompt, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coordinator.adapters.known import last_place
from pdserve.engine.adapters.read import read_adapter
from pdserve.engine.plan.model import ModelPlan
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import make_checkpoint
from tests.matrix import matrix
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt

peft = pytest.importorskip("peft")

ALL = {"r": 5, "target_modules": "all-linear"}
QUERIES = {"r": 4, "target_modules": ["q_proj"]}
PROMPT = make_prompt(60)
TRAINED = [PROMPT[40], PROMPT[3], 300, PROMPT[11]]
BEGINS = 31  # an aLoRA
CASES: list[tuple[str, dict[str, Any]]] = [
    (
        "llama",
        ALL
        | {
            "lora_alpha": 7,
            "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 9},
            "alpha_pattern": {"down_proj": 20},
            "use_rslora": True,
            "lora_bias": True,
        },
    ),
    ("llama", ALL | {"use_dora": True, "rank_pattern": {"q_proj": 3}}),
    ("mixtral", ALL),  # router and fused experts as parameters
    ("llama", {"r": 4, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    ("phi3", ALL),
    ("glm", ALL | {"lora_bias": True}),
    ("gemma3", {"r": 6, "target_modules": ["q_proj", "embed_tokens"]}),
    ("llama", QUERIES | {"modules_to_save": ["embed_tokens", "lm_head"]}),
    ("llama", {"r": 4, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}),
    ("mixtral", QUERIES | {"target_parameters": ["mlp.experts.down_proj"]}),
    ("mixtral", QUERIES | {"target_parameters": ["mlp.experts.gate_up_proj"]}),
    ("gpt_oss", QUERIES | {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    ("qwen2_moe", ALL),  # shared experts
    ("qwen3_moe", ALL | {"alpha_pattern": {"mlp.gate.weight": 30}}),
    ("llama", ALL | {"trainable_token_indices": TRAINED}),
    ("llama", ALL | {"task_type": "CAUSAL_LM", "alora_invocation_tokens": PROMPT[BEGINS:35]}),
    ("gemma3", QUERIES | {"trainable_token_indices": {"embed_tokens": TRAINED}}),  # tied
    ("llama", QUERIES | {"trainable_token_indices": {"embed_tokens": [5], "lm_head": TRAINED}}),
    ("granite", {"r": 3, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    ("granite4", ALL),
    ("deepseek_v3", ALL | {"rank_pattern": {"kv_b_proj": 3}}),
    ("deepseek_v2", {"r": 3, "target_modules": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]}),
    ("deepseek_v2", {"r": 3, "target_modules": ["q_a_proj", "o_proj"], "use_dora": True}),
    ("cohere2", ALL),
    ("phi3", ALL | {"use_dora": True, "use_rslora": True}),
    ("glm", {"r": 3, "target_modules": ["q_proj", "up_proj"], "use_dora": True}),  # biases
    ("gemma3", {"r": 3, "target_modules": ["v_proj", "down_proj"], "use_dora": True}),
]


def saved(folder: Path, base: Path, prompt: list[int], **config: Any) -> tuple[Tensor, Tensor]:
    """Save a random adapter; return the logits of the model with it, and without."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    adapted = peft.get_peft_model(model, peft.LoraConfig(**config)).eval()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            elif "lora_" in name:
                size = 0.3 if "_A" in name else 0.05
                parameter.copy_(size * torch.randn_like(parameter))
            elif "modules_to_save" in name or "trainable_tokens" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        adapted.save_pretrained(folder)
        expected = adapted(ids).logits[0]
        with adapted.disable_adapter():
            return expected, adapted(ids).logits[0]


@pytest.mark.filterwarnings("ignore")  # of PEFT, about what it saves
@pytest.mark.parametrize(("family", "config"), matrix(CASES, 2))
def test_logits_are_those_of_peft(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    base, prompt = make_checkpoint(tmp_path / "base", family), PROMPT
    expected, plain = saved(tmp_path / "adapter", base, prompt, **config)
    assert (expected - plain).abs().max() > 1
    for kind in DecoderKind:
        node = Node.load(base, kind)
        plan = ModelPlan.of(node.model.config)
        adapter = read_adapter(tmp_path / "adapter", plan, checkpoint=resolve_checkpoint(str(base)))
        node.model.take_adapter(adapter)
        begins = last_place(adapter.invocation, prompt)
        assert begins == (BEGINS if "alora_invocation_tokens" in config else 0)
        assert torch.equal(expected[:begins], plain[:begins])
        found = node.logits(prompt, adapter=adapter.digest, adapted_from=begins)
        assert (found - expected).abs().max() < 5e-4, kind
