"""A quantised file into packed matrices: each as it is stored, where that can be held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from pdserve.commands.bench.step.floor import StepWork
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.engine.models.config import load_model_config
from pdserve.engine.native.linear import PackedLinear
from pdserve.engine.native.load import load_native_weights
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.native.packed_folder import packed_files
from pdserve.engine.native.weights import NativeWeights
from pdserve.engine.plan.forms import BFLOAT16, FLOAT32, INT8, ActivationDtype, WeightForm
from pdserve.engine.plan.matrix import Matrix
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.plan.sizes import packed_bytes
from pdserve.engine.ranks.shard import WHOLE, Shard
from pdserve.engine.weights.codings import native_plan, stored_as
from pdserve.engine.weights.opening import open_tensors
from pdserve.engine.weights.packing import multiplied_as, packing
from pdserve.kv import KvDtype
from pdserve.measured.perf_model import StepRow
from pdserve.model_files.checkpoint import Checkpoint, resolve_checkpoint
from pdserve.model_files.gguf.container import read_gguf
from pdserve.shared.errors import ModelError
from tests.checkpoints import make_checkpoint
from tests.gguf_files import as_gguf
from tests.unpack import unpack

WIDE: Final = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "head_dim": 64,
}
TYPES: Final = {  # as in files called Q4_K_M
    "token_embd": "Q8_0",
    "attn_q": "Q5_0",
    "attn_k": "Q5_0",
    "attn_v": "Q8_0",
    "attn_output": "Q4_K",
    "ffn_gate": "Q5_0",
    "ffn_up": "Q5_0",
    "ffn_down": "Q6_K",
}


def q4_k_m(name: str) -> str:
    return TYPES.get(name.removesuffix(".weight").split(".")[-1], "F16")


def written(tmp_path: Path, type_of: Callable[[str], str] = q4_k_m, **fields: Any) -> Checkpoint:
    made = make_checkpoint(tmp_path / "made", "qwen3", **WIDE | fields)
    as_gguf(made, tmp_path / "m.gguf", type_of)
    return resolve_checkpoint(str(tmp_path / "m.gguf"))


def plan_of(checkpoint: Checkpoint, form: WeightForm = BFLOAT16, shard: Shard = WHOLE) -> ModelPlan:
    return native_plan(checkpoint, load_model_config(checkpoint), form, shard)


def load(
    checkpoint: Checkpoint, plan: ModelPlan, cache: PackedCache | None = None
) -> NativeWeights:
    dtype = torch.float32 if plan.form is FLOAT32 else torch.bfloat16
    return load_native_weights(checkpoint, plan, dtype, cache, lambda _: None)


def decoded(checkpoint: Checkpoint, plan: ModelPlan, matrix: Matrix) -> Tensor:
    tensors = open_tensors(checkpoint, plan.expected(), ignored=plan.ignored())
    return torch.cat([tensors[part.weight][cut] for part, _, cut in matrix.placed()])


def forms(plan: ModelPlan) -> dict[str, str]:
    return {matrix.name.removeprefix("model."): matrix.form.name for matrix in plan.matrices}


def test_matrices_are_kept_as_they_are_stored(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, tie_word_embeddings=True)
    plan = plan_of(checkpoint)
    assert forms(plan) == {
        "lm_head": "8 bits by 32",
        **{
            f"layers.{index}.{name}": form
            for index in range(2)
            for name, form in {
                "qkv": "8 bits by 32",  # Q5_0 is held by what Q8_0 needs
                "attention_out": "4 bits by 32",
                "gate_up": "5 bits by 32",
                "down": "6 bits by 16",
            }.items()
        },
    }
    weights = load(checkpoint, plan)
    for layer, planned in zip(weights.layers, plan.layers, strict=True):
        for name, matrix in planned.matrices.items():
            expected = decoded(checkpoint, plan, matrix)
            assert torch.equal(unpack(layer.matrices[name]), expected), name
    assert isinstance(weights.embedding, PackedLinear)
    assert weights.lm_head is not None
    assert weights.embedding.weights.data_ptr() == weights.lm_head.weights.data_ptr()
    assert checkpoint.gguf is not None
    file_bytes = sum(tensor.num_bytes for tensor in checkpoint.gguf.tensors.values())
    assert packed_bytes(plan, ActivationDtype.BFLOAT16) < 1.1 * file_bytes
    assert packed_bytes(ModelPlan.of(plan.config), ActivationDtype.BFLOAT16) > 2 * file_bytes


def test_it_is_said_what_is_packed_as_what_and_how_exactly(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, tie_word_embeddings=True)
    config = load_model_config(checkpoint)
    types = stored_as(checkpoint, config)
    assert sorted(packing(plan_of(checkpoint), types).split("; ")) == [
        "Q4_K as 4 bits by 32 (2, 0.1 MiB, exact)",
        "Q5_0 + Q8_0 as 8 bits by 32 (2, 0.3 MiB, exact)",
        "Q5_0 as 5 bits by 32 (2, 0.3 MiB, exact)",
        "Q6_K as 6 bits by 16 (2, 0.2 MiB, exact)",
        "Q8_0 as 8 bits by 32 (1, 0.1 MiB, exact)",
    ]
    lossy_plan = ModelPlan.of(config)
    lossy = packing(lossy_plan, types)
    assert "Q6_K as bfloat16 (2, 0.5 MiB, off by up to 0.2 %)" in lossy
    assert "off by up to 0.4 % of a row's largest" in packing(plan_of(checkpoint, INT8), types)
    bf16 = ActivationDtype.BFLOAT16
    integers = "8-bit integers, 16-bit around outliers"
    assert multiplied_as(plan_of(checkpoint), bf16) == integers
    assert multiplied_as(plan_of(checkpoint, INT8), bf16) == integers
    assert multiplied_as(lossy_plan, bf16) == "bfloat16"
    demo = resolve_checkpoint(str(CHECKPOINT_PATH))
    stored = stored_as(demo, load_model_config(demo))
    assert packing(plan_of(demo), stored) == "BF16 as bfloat16 (17, 3.8 MiB, exact)"


def test_a_step_reads_what_is_packed(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, tie_word_embeddings=True)
    row = [StepRow(1, 9, True)]
    coded, plain = (
        StepWork(plan, ActivationDtype.BFLOAT16, KvDtype.BFLOAT16).of(row)
        for plan in (plan_of(checkpoint), ModelPlan.of(load_model_config(checkpoint)))
    )
    assert coded.num_flops == plain.num_flops
    assert 0.3 * plain.num_bytes < coded.num_bytes < 0.5 * plain.num_bytes


def test_what_is_asked_to_be_quantised_is_so_in_all_matrices(tmp_path: Path) -> None:
    plan = plan_of(written(tmp_path), INT8)
    assert {*forms(plan).values()} == {"int8"}
    assert plan.coded == {}


def test_a_part_that_is_not_coded_takes_its_matrix_along(tmp_path: Path) -> None:
    def types(name: str) -> str:
        return "F16" if "attn_v" in name or "token_embd" in name else "Q4_0"

    checkpoint = written(tmp_path, types)
    plan = plan_of(checkpoint, FLOAT32)
    found = forms(plan)
    assert found.pop("layers.0.qkv") == found.pop("layers.1.qkv") == "float32"
    assert {*found.values()} == {"4 bits by 32"}
    assert plan.table is None
    weights = load(checkpoint, plan)
    assert isinstance(weights.embedding, Tensor)
    qkv = decoded(checkpoint, plan, plan.layers[0].matrices["qkv"])
    assert torch.equal(unpack(weights.layers[0].matrices["qkv"]), qkv)


@pytest.mark.parametrize("rank", range(2))
def test_ranks_have_their_rows_and_columns_and_their_vocabulary(tmp_path: Path, rank: int) -> None:
    checkpoint = written(tmp_path)
    plan = plan_of(checkpoint, FLOAT32, Shard(rank, 2))
    found = forms(plan)
    assert found["layers.0.down"] == "6 bits by 16"  # 256 of 512 inputs: the first 256 or the last
    assert found["layers.0.attention_out"] == "float32"  # 128 of 256, which share a scale
    weights = load(checkpoint, plan)
    for layer, planned in zip(weights.layers, plan.layers, strict=True):
        for name, matrix in planned.matrices.items():
            expected = decoded(checkpoint, plan, matrix)
            assert torch.equal(unpack(layer.matrices[name]), expected), name
    assert isinstance(weights.embedding, PackedLinear)
    assert plan.table is not None
    assert torch.equal(unpack(weights.embedding), decoded(checkpoint, plan, plan.table))


def test_packed_files_tell_codes_from_other_forms(tmp_path: Path) -> None:
    checkpoint = written(tmp_path)
    cache = PackedCache(tmp_path / "cache", 1 << 30, wait_s=30.0)
    coded = plan_of(checkpoint)
    for plan in (coded, ModelPlan.of(coded.config), coded):
        load(checkpoint, plan, cache)
    sizes = {file.path.name: file.num_bytes for file in packed_files(cache.folder)}
    (as_stored,) = [name for name in sizes if name.startswith("m-bfloat16-as-stored-")]
    (plain,) = sizes.keys() - {as_stored}
    assert sizes[as_stored] < 0.6 * sizes[plain]


def test_a_scale_that_is_not_finite_is_found_where_it_is(tmp_path: Path) -> None:
    checkpoint = written(tmp_path)
    tensor = read_gguf(checkpoint.path).tensors["blk.1.ffn_down.weight"]
    content = bytearray(checkpoint.path.read_bytes())
    end = tensor.offset + (7 * 2 + 1) * 210  # of row 7, the first of two blocks
    content[end - 2 : end] = b"\xff\x7f"
    checkpoint.path.write_bytes(content)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj.* NaN .* in row 7"):
        load(checkpoint, plan_of(checkpoint))
