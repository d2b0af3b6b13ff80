"""Models in GGUF files: the weights are those that the blocks stand for, and so are the logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.engine.models.config import load_model_config
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.weights.opening import open_tensors
from pdserve.engine.weights.stored.tensors import StoredTensor
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.model_files.gguf.container import read_gguf
from pdserve.shared.errors import MissingTensor, ModelError
from tests.checkpoints import make_checkpoint
from tests.gguf_files import as_gguf, gguf
from tests.matrix import matrix
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt
from tests.unit.engine_model.reference import assert_node_matches

LATENT = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "moe_intermediate_size": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "F16", "BF16", "F32"]
TYPES += ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", WIDE),
    "qwen2": ("qwen2", {**WIDE, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**WIDE, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", WIDE),
    "qwen3_moe": ("qwen3_moe", {**WIDE, "moe_intermediate_size": 256}),
    "qwen2_moe": (
        "qwen2_moe",
        {**WIDE, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512},
    ),
    "phi3": (
        "phi3",
        {
            **WIDE,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.125,
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
            },
        },
    ),
    "granite": ("granite", {**WIDE, "attention_bias": True}),
    "olmo2": ("olmo2", WIDE),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v2, heads not split": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "gpt_oss": ("gpt_oss", {**WIDE, "num_hidden_layers": 2}),
    "olmo3": (
        "olmo3",
        {
            **WIDE,
            "num_hidden_layers": 2,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500_000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "attention_factor": 1.5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    # Every fourth layer does not rotate: no key says so.
    "smollm3": ("smollm3", {**WIDE, "num_hidden_layers": 4, "no_rope_layers": None}),
    "glm4": ("glm4", {**WIDE, "head_dim": 64}),
    # Every fourth layer has no window: likewise.
    "cohere2": ("cohere2", {**WIDE, "num_hidden_layers": 4, "layer_types": None}),
    # The scale of queries is not in the file.
    "gemma2": ("gemma2", {**WIDE, "num_hidden_layers": 2, "query_pre_attn_scalar": 32}),
    "gemma3": (
        "gemma3",
        {
            **WIDE,
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
            },
        },
    ),
}

# Of each order of heads, and of each way to store experts, a case.
TELLING = {"llama", "deepseek_v3", "gpt_oss"}


def mixed(name: str) -> str:
    """As real files: every type for some tensor."""
    return TYPES[sum(name.encode()) % len(TYPES)]


@pytest.fixture(scope="module", params=matrix(CASES, TELLING))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A GGUF file, and a folder with the same weights."""
    family, fields = CASES[request.param]
    folder = tmp_path_factory.mktemp(family)
    made = make_checkpoint(folder / "made", family, **fields)
    splits_heads = "not split" not in request.param
    written = as_gguf(made, folder / "m.gguf", mixed, splits_heads=splits_heads)
    return folder / "m.gguf", written


def test_a_gguf_file_computes_what_its_weights_are(pair: tuple[Path, Path]) -> None:
    """Coded or not: in float32, what is packed as it is stored has the bits of what is decoded.

    In bfloat16 codes are multiplied as integers, by activations of 8 bits but for outliers.
    """
    file, folder = pair
    prompt = make_prompt(40)
    for kind in DecoderKind:
        exact, other = (Node.load(path, kind).logits(prompt) for path in (file, folder))
        assert torch.equal(exact, other)
        assert exact.std() > 0.01
    errors = [
        (Node.load(path, dtype=KvDtype.BFLOAT16).logits(prompt) - exact).square().mean().sqrt()
        for path in (file, folder)
    ]
    assert errors[0] < 2 * errors[1] < 0.3 * exact.std()


def _opened(path: Path) -> dict[str, StoredTensor]:
    """All of its tensors, wherever this checkpoint has them."""
    checkpoint = resolve_checkpoint(str(path))
    plan = ModelPlan.of(load_model_config(checkpoint))
    return open_tensors(checkpoint, plan.expected(), ignored=plan.ignored(), within=plan.within())


def test_ranks_read_their_parts_alone(pair: tuple[Path, Path]) -> None:
    file, folder = pair
    config = load_model_config(resolve_checkpoint(str(file)))
    expected = ModelPlan.of(config).expected()
    of_file, of_folder = (_opened(path) for path in (file, folder))
    random = np.random.default_rng(0)
    for name, shape in expected.items():
        cuts = [sorted(random.integers(0, size, 2)) for size in shape]
        part = tuple(slice(int(start), int(stop) + 1) for start, stop in cuts)
        for some in (part, part[:1], ()):
            offset = 1 if config.has_wide_norms and "norm" in name else 0  # of Gemma's file
            held = of_folder[name][some].float() + offset
            assert torch.equal(of_file[name][some], held), (name, some)


@pytest.mark.parametrize(("case", "splits_heads"), [("v2", False), ("v2 lite", True), ("v3", True)])
def test_latent_attention_matches_transformers(
    case: str, splits_heads: bool, tmp_path: Path
) -> None:
    """Files of DeepSeek, new and old; they say mscale_all_dim, of which mscale is no other."""
    ungrouped = {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
    fields = ungrouped if case == "v2 lite" else {}
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    }
    made = make_checkpoint(
        tmp_path / "made", f"deepseek_{case[:2]}", rope_parameters=yarn, **fields
    )
    file = tmp_path / "m.gguf"
    as_gguf(made, file, lambda name: "F32", splits_heads=splits_heads)
    assert_node_matches(made, Node.load(file))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("expert_gating_func", 4, "must be 2 .sigmoid."),
        ("attention.key_length_mla", 12, "more than the 12 dimensions that are rotated"),
        ("attention.temperature_scale", 0.1, "absent: it asks for arithmetic"),  # Mistral Large 3
    ],
)
def test_what_deepseek_does_not_compute_is_refused(
    key: str, value: float, said: str, tmp_path: Path
) -> None:
    made = make_checkpoint(tmp_path / "made", "deepseek_v3", num_hidden_layers=2)

    def change(writer: Any) -> None:
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        writer.kv_data[0].pop(f"deepseek2.{key}", None)
        add(f"deepseek2.{key}", value)

    as_gguf(made, tmp_path / "m.gguf", lambda name: "F32", extra=change)
    with pytest.raises(ModelError, match=rf"{key} is {value}; .*{said}"):
        load_model_config(resolve_checkpoint(str(tmp_path / "m.gguf")))


def test_rope_divisors_and_what_is_said_of_them(tmp_path: Path) -> None:
    """Llama 3.1: what its config.json says of frequencies is a tensor in GGUF."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    made = make_checkpoint(tmp_path / "made", "llama", rope_parameters=scaling)
    plain = 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    turns = 64 * plain / (2 * np.pi)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    divisors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)

    def write(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", divisors)

    file = tmp_path / "m.gguf"
    folder = as_gguf(made, file, lambda name: "F32", extra=write)
    prompt = make_prompt(300)
    logits = [Node.load(path).logits(prompt) for path in (file, folder)]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


def test_granite_4_without_mamba_is_granite(tmp_path: Path) -> None:
    """Though its files say how wide Mamba layers would be."""

    def of_granite_4(writer: Any) -> None:
        writer.add_expert_shared_feed_forward_length(96)
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(256)
        writer.add_ssm_group_count(1)
        writer.add_ssm_inner_size(128)
        writer.add_ssm_time_step_rank(4)
        writer.add_rope_scaling_finetuned(True)

    made = make_checkpoint(tmp_path / "made", "granite", num_hidden_layers=1)
    configs = []
    for number, extra in enumerate((lambda writer: None, of_granite_4)):
        as_gguf(made, tmp_path / f"{number}.gguf", lambda name: "F32", extra=extra)
        configs.append(load_model_config(resolve_checkpoint(str(tmp_path / f"{number}.gguf"))))
    assert configs[0] == configs[1]


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_what_a_file_of_gemma_does_not_say_is_of_the_family(family: str, tmp_path: Path) -> None:
    name = family

    def without(writer: Any) -> None:
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "rope.freq_base"):
            writer.kv_data[0].pop(f"{name}.{key}", None)

    def largest(writer: Any) -> None:
        without(writer)
        writer.kv_data[0][f"{name}.block_count"].value = {"gemma2": 46, "gemma3": 62}[name]

    def said(writer: Any) -> None:
        writer.add_sliding_window_pattern([True, False, False, False])
        writer.add_float32(f"{name}.final_logit_softcapping", 0.0)
        if name == "gemma3":
            writer.add_float32("gemma3.rope.freq_base_swa", 5000.0)

    made = make_checkpoint(
        tmp_path / "made", family, num_hidden_layers=4, hidden_size=96, final_logit_softcapping=None
    )
    configs = []
    for number, extra in enumerate((without, largest, said)):
        file = tmp_path / f"{number}.gguf"
        as_gguf(made, file, lambda name: "F32", extra=extra)
        configs.append(load_model_config(resolve_checkpoint(str(file))))
    of_family, of_largest, of_file = configs
    caps = of_family.arithmetic.attention_cap, of_family.arithmetic.logit_cap
    assert caps == ((50.0, 30.0) if family == "gemma2" else (None, None))
    assert (of_family.attention_scale, of_largest.attention_scale) == (32**-0.5, 24**-0.5)
    bases = {rope.theta for rope in of_largest.ropes if rope}
    assert bases == ({10_000.0} if family == "gemma2" else {10_000.0, 1e6})
    num_windows = sum(window == 40 for window in of_largest.sliding_windows)
    assert num_windows == (23 if family == "gemma2" else 52)
    assert of_family.ties_embeddings
    assert of_family.norm_offset == 0, "files have it added"
    assert of_file.sliding_windows == (40, None, None, None)
    assert of_file.arithmetic.logit_cap is None
    local, whole = of_file.ropes[0], of_file.ropes[1]
    assert local is not None
    assert whole is not None
    assert local.theta == (10_000.0 if family == "gemma2" else 5000.0)
    assert whole.theta == (10_000.0 if family == "gemma2" else 1e6)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda w: w.add_tensor("blk.0.odd", np.zeros(4, np.float32)), ModelError, "blk.0.odd"),
        (lambda w: w.add_float32("llama.logit_scale", 0.5), ModelError, "llama.logit_scale is 0.5"),
        (lambda w: w.add_uint32("llama.new_thing", 1), ModelError, "llama.new_thing"),
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            ModelError,
            "short_factor",
        ),
    ],
)
def test_what_would_compute_something_else_is_refused_by_name(
    change: Callable[[Any], None], error: type[ModelError], said: str, tmp_path: Path
) -> None:
    made = make_checkpoint(tmp_path / "made", "llama")
    as_gguf(made, tmp_path / "m.gguf", lambda name: "Q8_0", extra=change)
    with pytest.raises(error, match=said):
        Node.load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("architecture", "kind", "said"),
    [
        ("falcon", "model", "is of the architecture falcon; supported are llama, "),
        (
            "llama",
            "adapter",
            "is no model, but of the type adapter .*name the file of the language",
        ),
        ("clip", "mmproj", "is no model, but of the type mmproj"),
    ],
)
def test_what_is_no_model_that_is_served_is_told_before_tokens_are_missed(
    architecture: str, kind: str, said: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_type(kind)
    writer.add_tensor("a.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=said):
        load_model_config(resolve_checkpoint(str(tmp_path / "m.gguf")))


@pytest.mark.parametrize(
    ("kind", "block_bytes", "scale"), [("Q8_0", 34, b"\xff\x7f"), ("MXFP4", 17, b"\xff")]
)
@pytest.mark.parametrize(  # the file has the rows of a head in another order
    ("stored", "told"),
    [
        ("ffn_up", r"mlp\.up_proj.* NaN .* row 7:"),
        ("attn_q", r"self_attn\.q_proj.* NaN .* row 11:"),
    ],
)
def test_a_scale_that_is_not_finite_is_found_where_it_is(
    kind: str, block_bytes: int, scale: bytes, stored: str, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "m.gguf"
    as_gguf(make_checkpoint(tmp_path / "made", "llama"), file, lambda name: kind)
    tensor = read_gguf(file).tensors[f"blk.1.{stored}.weight"]
    content = bytearray(file.read_bytes())
    row = 7 * 2 * block_bytes  # of 64 columns
    content[tensor.offset + row : tensor.offset + row + len(scale)] = scale
    file.write_bytes(content)
    with pytest.raises(ModelError, match=rf"layers\.1\.{told}"):
        Node.load(file)


def test_a_missing_tensor_is_named_as_the_file_would(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "llama", num_hidden_layers=1)

    def more_layers(writer: Any) -> None:
        writer.kv_data[0]["llama.block_count"].value = 2

    as_gguf(made, tmp_path / "m.gguf", lambda name: "F16", extra=more_layers)
    with pytest.raises(MissingTensor, match=r"m\.gguf lacks blk\.1\.attn_k\.weight"):
        Node.load(tmp_path / "m.gguf")
