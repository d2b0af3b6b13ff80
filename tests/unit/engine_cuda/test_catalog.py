"""Which attention a GPU gets, and why not another."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from pdserve.engine.cuda.attention import catalog
from pdserve.engine.cuda.attention.catalog import KINDS, AttentionNeeds, choose_kind
from pdserve.shared.errors import ConfigError
from tests.fakes.cards import show_cards

HALF = AttentionNeeds(torch.bfloat16, 128)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A GPU of this compute capability with these modules, and no others of those we look for."""

    def make(capability: tuple[int, int], *modules: str) -> None:
        show_cards(monkeypatch, [1 << 30], capability)
        for name in ("triton", "flashinfer", "flash_attn_interface"):
            module = ModuleType(name) if name in modules else None  # None: cannot be imported
            monkeypatch.setitem(sys.modules, name, module)

    return make


@pytest.mark.parametrize(
    ("capability", "modules", "chosen"),
    [
        ((9, 0), ["triton", "flashinfer", "flash_attn_interface"], "flashinfer"),
        ((9, 0), ["triton", "flash_attn_interface"], "flash_attn"),
        ((8, 0), ["triton", "flash_attn_interface"], "triton"),  # FlashAttention 3 is Hopper's
        ((9, 0), ["triton"], "triton"),
        ((7, 5), ["triton", "flashinfer"], "reference"),
        ((9, 0), ["flashinfer"], "reference"),  # nothing would write keys and values
    ],
)
def test_the_best_that_works_is_chosen(machine, capability, modules, chosen) -> None:
    machine(capability, *modules)
    assert choose_kind("", HALF).name == chosen
    assert choose_kind(chosen, HALF).name == chosen


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        (AttentionNeeds(torch.float32, 128), "bfloat16"),
        (AttentionNeeds(torch.bfloat16, 80), "heads of"),
        (AttentionNeeds(torch.bfloat16, 64, has_sinks=True), "sinks"),
        (AttentionNeeds(torch.bfloat16, 64, kv_codes=True), "reads no KV in codes"),
        (AttentionNeeds(torch.bfloat16, 576, value_dim=512), "latent attention"),
    ],
)
def test_a_model_that_the_libraries_do_not_know_gets_ours(machine, needs, why) -> None:
    machine((9, 0), "triton", "flashinfer", "flash_attn_interface")
    assert choose_kind("", needs).name == "triton"
    for name in ("flashinfer", "flash_attn"):
        with pytest.raises(ConfigError, match=f"{name}.*was asked for.*{why}"):
            choose_kind(name, needs)


def test_what_was_asked_for_and_is_missing_is_an_error(machine) -> None:
    machine((9, 0), "triton")
    with pytest.raises(ConfigError, match=r"'flashinfer' was asked for.*pip install"):
        choose_kind("flashinfer", HALF)
    with pytest.raises(ConfigError, match="no attention is called 'flash': choose of flashinfer"):
        choose_kind("flash", HALF)


def test_without_a_gpu_nothing_but_the_reference_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    show_cards(monkeypatch, [])
    reasons = {kind.name: kind.obstacle(None) for kind in KINDS}
    assert reasons.pop("reference") is None
    assert set(reasons.values()) == {"torch finds no GPU"}
    assert choose_kind("", None).name == "reference"


def test_a_node_without_triton_serves_with_plain_torch(machine, tmp_path, caplog) -> None:
    from pdserve.engine.cuda.load import cuda_decoder
    from pdserve.engine.models.config import load_model_config
    from pdserve.engine.models.parameters import allocate_weights
    from pdserve.engine.models.torch_decoder import TorchDecoder
    from pdserve.engine.plan.model import ModelPlan
    from pdserve.model_files.checkpoint import resolve_checkpoint
    from tests.checkpoints import make_checkpoint

    machine((9, 0))
    config = load_model_config(resolve_checkpoint(str(make_checkpoint(tmp_path, "llama"))))
    weights = allocate_weights(ModelPlan.of(config), torch.bfloat16, torch.device("cpu"))
    assert isinstance(cuda_decoder(config, weights), TorchDecoder)
    assert "plain torch" in caplog.text
    with pytest.raises(ConfigError, match="'triton' was asked for"):
        cuda_decoder(config, weights, attention="triton")


def test_names_are_those_that_the_backends_have() -> None:
    names = [kind.name for kind in catalog.KINDS]
    assert names == ["flashinfer", "flash_attn", "triton", "reference"]
