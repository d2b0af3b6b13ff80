"""Quantised checkpoints that are damaged, or not of a kind that is read: what is said of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.engine.models.config import load_model_config
from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.quantised.config import parse_quantisation
from pdserve.engine.plan.forms import ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.weights.load import Progress, load_torch_weights
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.shared.errors import ModelError
from tests.checkpoints import edit_config, make_checkpoint
from tests.matrix import matrix
from tests.quantised_files import FORMATS, Written, compressed, quantised
from tests.quantised_writers import packed_of
from tests.unit.engine_model.weights.test_quantised import opened

Tensors = dict[str, Tensor]
UINT8 = torch.uint8
UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"
STATE = f"{DOWN}.weight.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("made"), "llama", num_hidden_layers=1)


def load(path: Path, on_progress: Progress | None = None) -> None:
    checkpoint = resolve_checkpoint(str(path))
    plan = ModelPlan.of(load_model_config(checkpoint))
    cpu = torch.device("cpu")
    load_torch_weights(checkpoint, plan, ActivationDtype.FLOAT32, cpu, on_progress)


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return edit


def first_set(name: str, value: float) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name].view(-1)[0] = value

    return edit


DAMAGES: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "scales": ("awq", lambda t: t.pop(f"{UP}.scales"), rf"{UP} is quantised.* no {UP}\.scales"),
    "zeros": ("gptq", lambda t: t.pop(f"{UP}.qzeros"), rf"no {UP}\.qzeros"),
    "codes": ("gptq", lambda t: t.pop(f"{UP}.qweight"), rf"lacks {UP}\.weight"),
    "groups": ("awq", replaced(f"{UP}.scales", lambda t: t[:-1]), r"\[3, 96\].* make it \[4, 96\]"),
    "narrow": ("gptq", replaced(f"{UP}.qweight", lambda t: t[:, 8:]), r"qweight has the shape"),
    "empty": ("awq", replaced(f"{UP}.qzeros", lambda t: t[:0]), r"qzeros has the shape \[0, 12\]"),
    "type": ("awq", replaced(f"{UP}.qweight", lambda t: t.float()), "float32; it must be int32"),
    "order": ("gptq", first_set(f"{UP}.g_idx", 2), "groups that there are not: there are 2"),
    "negative": ("gptq", first_set(f"{UP}.g_idx", -1), "groups that there are not"),
    "nan": ("awq", first_set(f"{UP}.scales", float("nan")), rf"{UP}\.weight holds a NaN"),
    "infinite": ("packed", first_set(f"{DOWN}.weight_scale", float("inf")), r"in row 0"),
    "nan-code": (
        "fp8-row",
        replaced(f"{UP}.weight", lambda t: torch.full_like(t.float(), torch.nan).to(t.dtype)),
        "holds a NaN",
    ),
    "powers": ("mxfp4", first_set(f"{UP}.weight_scale", 255), "holds a NaN"),
    "said-shape": ("packed", first_set(f"{UP}.weight_shape", 95), r"weight_shape is \[95, 64\]"),
    "words": ("packed", replaced(f"{UP}.weight_packed", lambda t: t[:, 1:]), "weight_packed has"),
    "blocks": ("fp8-block", replaced(f"{UP}.weight_scale_inv", lambda t: t[1:]), r"\[2, 3\]"),
    "shared": ("nvfp4", lambda t: t.pop(f"{UP}.weight_global_scale"), "no .*weight_global_scale"),
    "state": ("nf4", replaced(STATE, lambda t: t[:-1]), "bitsandbytes__nf4 is not valid JSON"),
    "no-state": ("nf4", lambda t: t.pop(STATE), "no .*bitsandbytes__nf4"),
    "bytes": ("nf4", replaced(f"{DOWN}.weight", lambda t: t[:-1]), "3071 bytes, but 6144 numbers"),
    "by-column": ("llm-int8", first_set(f"{UP}.weight_format", 1), "must be 0"),
    "ao": ("torchao-int8", replaced(f"{UP}._weight_scale", lambda t: t[1:]), "does not divide"),
    "more": ("awq", lambda t: t.update({f"{UP}.other": torch.ones(1)}), rf"holds {UP}\.other"),
    "bias": ("gptq", lambda t: t.update({f"{UP}.bias": torch.ones(96)}), rf"holds {UP}\.bias"),
    "both": ("awq", lambda t: t.update({f"{UP}.weight": torch.ones(96, 64)}), rf"{UP}\.weight"),
}


@pytest.mark.parametrize("damage", matrix(DAMAGES, 6))
def test_damaged_tensors_are_named(damage: str, made: Path, tmp_path: Path) -> None:
    name, edit, said = DAMAGES[damage]
    quantised(made, tmp_path / "q", FORMATS[name])
    tensors = {
        key: each.clone() for key, each in load_file(tmp_path / "q/model.safetensors").items()
    }
    edit(tensors)
    save_file(tensors, tmp_path / "q/model.safetensors")
    with pytest.raises(ModelError, match=said):
        load(tmp_path / "q")


SCALES = (
    "scales", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "SCB",
    "weight.absmax", "weight.nested_absmax", "_weight_scale",
)  # fmt: skip


@pytest.mark.parametrize("name", matrix(FORMATS, 5))
def test_a_bad_scale_is_found_before_anything_is_decoded(
    name: str, made: Path, tmp_path: Path
) -> None:
    quantised(made, tmp_path / "q", FORMATS[name])
    file = tmp_path / "q/model.safetensors"
    whole = load_file(file)
    scales = [f"{DOWN}.{scale}" for scale in SCALES if f"{DOWN}.{scale}" in whole]
    scales = [one for one in scales if not (one.endswith("absmax") and whole[one].dtype == UINT8)]
    assert scales
    for scale in scales:
        bits = whole[scale].clone().flatten().view(UINT8)
        size = whole[scale].element_size()
        bits[-size:] = 0xFF  # of every type of scales: no number
        save_file(whole | {scale: bits.view(whole[scale].dtype).view(whole[scale].shape)}, file)
        with pytest.raises(ModelError, match=rf"{DOWN}\.weight holds a NaN .* in row \d+"):
            load(tmp_path / "q", fail)


def fail(share: float) -> None:
    raise AssertionError(f"{share} of it was loaded")


def test_a_tensor_in_two_files_and_a_file_that_is_cut(made: Path, tmp_path: Path) -> None:
    quantised(made, tmp_path / "q", FORMATS["awq"], num_files=2)
    first, second = sorted((tmp_path / "q").glob("*.safetensors"))
    tensors = load_file(second)
    save_file(load_file(first) | {"lm_head.weight": torch.ones(320, 64)}, first)
    save_file(tensors | {"lm_head.weight": torch.ones(320, 64)}, second)
    with pytest.raises(ModelError, match=r"00001-of-00002\S+ and \S+ both hold lm_head\.weight"):
        load(tmp_path / "q")
    second.write_bytes(second.read_bytes()[:-10])
    with pytest.raises(ModelError, match=r"00002.* is damaged"):
        load(tmp_path / "q")


def test_three_bits_of_which_nothing_shows_the_layout(made: Path, tmp_path: Path) -> None:
    """4 inputs a row take one word, however they are packed."""
    config = compressed("pack-quantized", num_bits=7, strategy="channel")
    narrow = make_checkpoint(
        tmp_path / "made", "llama", hidden_size=4, num_attention_heads=1, num_key_value_heads=1,
        num_hidden_layers=1,
    )  # fmt: skip
    quantised(narrow, tmp_path / "q", Written(config, packed_of(7, -1, has_zeros=False)))
    with pytest.raises(ModelError, match="two layouts"):
        load(tmp_path / "q")


def test_a_module_that_no_group_is_for(made: Path, tmp_path: Path) -> None:
    packed = FORMATS["packed"]
    config = packed.config | {
        "config_groups": {
            "group_0": packed.config["config_groups"]["group_0"] | {"targets": ["re:.*down"]}
        }
    }
    quantised(made, tmp_path / "q", Written(config, packed.write))
    with pytest.raises(ModelError, match="q_proj is quantised, but nothing there says how"):
        load(tmp_path / "q")


def test_zeros_for_a_bias_that_the_model_has_not_and_tensors_that_are_not_aligned(
    made: Path, tmp_path: Path
) -> None:
    """As older writers of GPTQ have it; and as the format allows it: a header of any length."""
    plain = quantised(made, tmp_path / "q", FORMATS["llm-int8"])
    file = tmp_path / "q/model.safetensors"
    tensors = load_file(file) | {f"{UP}.bias": torch.zeros(96)}
    names = sorted(tensors, key=lambda name: tensors[name].nbytes)  # single bytes are first
    header, start = {}, 0
    kinds = {torch.float32: "F32", torch.int8: "I8", torch.uint8: "U8"}
    for name in names:
        each = tensors[name]
        end = start + each.nbytes
        entry = {"dtype": kinds[each.dtype], "shape": list(each.shape)}
        header[name] = entry | {"data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)
    content = [tensors[name].numpy().tobytes() for name in names]
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(content))
    expected = opened(plain)
    for name, tensor in opened(tmp_path / "q").items():
        assert torch.equal(tensor[()].float(), expected[name][()].float()), name


CT: dict[str, Any] = compressed("pack-quantized", num_bits=4, strategy="channel")
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "hqq"}, "'hqq' is not read; read are awq, gptq"),
    ({"quant_method": 4}, "quant_method is 4"),
    ({"quant_method": "awq", "bits": 3, "group_size": 64}, "bits is 3; it must be 4"),
    ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size is 0"),
    ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "'gemm'"),
    ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": 8}, "true or false"),
    ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:x"}, "auto_awq of in"),
    (
        {
            **{"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"},
            **{"group_size": 32, "extra_config": {"lm_head": {"bits": 8}}},
        },
        "lm_head: bits is 8; it must be one of 4, or 16",
    ),
    ({"quant_method": "gptq", "bits": 5}, "one of 2, 3, 4, 8"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_p"}, "'gptq_p'.* gptq_v2"),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format is True"),
    ({"quant_method": "gptq", "bits": 3, "sym": False}, "writers differ"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, "no regular expression"),
    (CT | {"format": "marlin-24"}, "'marlin-24' is not read; read are pack-quantized"),
    (CT | {"config_groups": {}}, "groups with targets and weights"),
    (CT | {"transform_config": {"config_groups": {"a": {}}}}, "rotations"),
    (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
    (compressed("pack-quantized", num_bits=9), "num_bits is 9"),
    (compressed("pack-quantized", num_bits=4, type="float"), "int in the format pack-quantized"),
    (compressed("float-quantized", type="float", strategy="block"), "block_structure is absent"),
    (compressed("nvfp4-pack-quantized", type="float", num_bits=4, group_size=32), "16 in nvfp4"),
    (compressed("int-quantized", num_bits=8, strategy="token"), "strategy is 'token'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "two whole numbers"),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "one of FP8, "),
    ({"quant_method": "bitsandbytes"}, "load_in_4bit is absent"),
    (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
        "Int4WeightOnlyConfig is not read, as its layout may depend on the hardware",
    ),
]


@pytest.mark.parametrize(("config", "said"), CONFIGS)
def test_configs_that_are_not_read(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as info:
        parse_quantisation(JsonFields({"quantization_config": config}, "config.json"))
    assert str(info.value).startswith("config.json: quantization_config")


def test_what_a_side_file_says_is_checked_too(made: Path, tmp_path: Path) -> None:
    quantised(made, tmp_path / "q", FORMATS["gptq"])
    edit_config(tmp_path / "q", quantization_config=None)
    said = {"bits": 4, "group_size": 32, "desc_act": True, "sym": False}
    (tmp_path / "q/quantize_config.json").write_text(json.dumps(said))
    load(tmp_path / "q")
    (tmp_path / "q/quantize_config.json").write_text(json.dumps(said | {"bits": 6}))
    with pytest.raises(ModelError, match=r"quantize_config\.json: bits is 6"):
        load_model_config(resolve_checkpoint(str(tmp_path / "q")))
