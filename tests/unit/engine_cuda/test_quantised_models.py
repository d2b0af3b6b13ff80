"""Models of quantised weights in CudaDecoder, beside what CPUs make of the same files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("triton")

from pdserve.commands.bench.checkpoints.random_checkpoint import config_of
from pdserve.commands.bench.checkpoints.shapes import SHAPES
from pdserve.engine.adapters.read import read_adapter
from pdserve.engine.cuda.attention import catalog
from pdserve.engine.cuda.attention.triton_attention import TritonAttention
from pdserve.engine.cuda.copies.staging import Staging
from pdserve.engine.cuda.decoder import CudaDecoder
from pdserve.engine.cuda.quantised.linear import QuantisedLinear, device_linear
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.layers import Mlp
from pdserve.engine.models.config import load_model_config, parse_model_config
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.parameters import DecoderWeights, allocate_weights
from pdserve.engine.plan.forms import FORMS, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.plan.sizes import weight_bytes
from pdserve.engine.ranks.shard import WHOLE, Shard
from pdserve.engine.weights.codings import device_plan, native_plan
from pdserve.engine.weights.load import load_decoder, load_device_weights
from pdserve.engine.weights.opening import open_tensors
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import Checkpoint, resolve_checkpoint
from pdserve.shared.errors import ModelError
from tests.adapters import ALL_LINEAR, make_adapter
from tests.checkpoints import make_checkpoint
from tests.fakes.late_copies import PromptCopies
from tests.gguf_files import as_gguf
from tests.matrix import matrix
from tests.quantised_files import AWQ, quantised
from tests.requests import make_request
from tests.unit.engine_cuda.decoders import make_node, tensors_of
from tests.unit.engine_model.small_models import Part, make_batch
from tests.unit.engine_native.test_load_codes import WIDE, q4_k_m

pytestmark = pytest.mark.usefixtures("interpreted", "with_triton")

CPU = torch.device("cpu")
BF16 = ActivationDtype.BFLOAT16
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
TOKENS = [3, 200, 17, 90, 41]


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is an interpreter instead of a GPU."""
    monkeypatch.setattr(catalog, "triton_missing", lambda: None)


def q4_k_m_of(tmp_path: Path) -> Checkpoint:
    fields: dict[str, Any] = WIDE | {"num_hidden_layers": 1, "tie_word_embeddings": True}
    made = make_checkpoint(tmp_path / "made", "qwen3", **fields)
    as_gguf(made, tmp_path / "m.gguf", q4_k_m)
    return resolve_checkpoint(str(tmp_path / "m.gguf"))


def awq_of(tmp_path: Path) -> Checkpoint:
    made = make_checkpoint(tmp_path / "m", "llama", **SMALL)
    quantised(made, tmp_path / "awq", AWQ)
    return resolve_checkpoint(str(tmp_path / "awq"))


def plain_of(tmp_path: Path, family: str = "llama") -> Checkpoint:
    sizes: dict[str, Any] = {} if family == "qwen3_next" else SMALL
    return resolve_checkpoint(str(make_checkpoint(tmp_path / "m", family, **sizes)))


def loaded(
    checkpoint: Checkpoint, quantization: str = "none", shard: Shard = WHOLE
) -> tuple[ModelPlan, DecoderWeights]:
    form = FORMS["bfloat16" if quantization == "none" else quantization]
    plan = device_plan(checkpoint, load_model_config(checkpoint), form, shard)
    return plan, load_device_weights(checkpoint, plan, BF16, CPU)


def decoders(checkpoint: Checkpoint, quantization: str = "none") -> tuple[Decoder, Decoder]:
    """Of a CPU, and of a GPU."""
    plan, weights = loaded(checkpoint, quantization)
    assert any(isinstance(each, QuantisedLinear) for each in weights.layers[0].linears)
    native = native_plan(checkpoint, plan.config, plan.form)
    cuda = CudaDecoder(plan.config, weights, TritonAttention(), Staging(PromptCopies()), None)
    return load_decoder(checkpoint, native, BF16, CPU), cuda


def logits(decoder: Decoder, adapter: str = "") -> torch.Tensor:
    """[tokens, vocab_size] of TOKENS."""
    cache = KvCache(decoder.config.kv_layout(16, KvDtype.BFLOAT16), 3, CPU)
    batch = make_batch([Part(TOKENS, 0, len(TOKENS), [0])], 16)
    if adapter:
        batch = replace(batch, adapters=(adapter,), adapted_from=(0,))
    with torch.inference_mode():
        found = decoder.logits(batch, cache.pool)
    assert found is not None
    return found.clone()


CASES = {
    "int8": (plain_of, "int8"),
    "Q4_K_M": (q4_k_m_of, "none"),
    "AWQ": (awq_of, "none"),
    "int4": (plain_of, "int4"),
    "fp8": (plain_of, "fp8"),
    "int8 experts": (lambda path: plain_of(path, "qwen2_moe"), "int8"),
    "int4 experts": (lambda path: plain_of(path, "gpt_oss"), "int4"),
}


@pytest.mark.parametrize("case", matrix(CASES, 1))
def test_a_model_says_on_a_gpu_what_it_says_on_a_cpu(case: str, tmp_path: Path) -> None:
    """But for bfloat16, which the interpreter cuts off."""
    make, quantization = CASES[case]
    on_cpu, on_gpu = map(logits, decoders(make(tmp_path), quantization))
    assert (on_gpu - on_cpu).std() < 0.06 * on_cpu.std()


@pytest.mark.long
def test_adapters_are_added_to_quantised_products(tmp_path: Path) -> None:
    checkpoint = plain_of(tmp_path)
    folder = make_adapter(tmp_path / "a", checkpoint.path, modules=ALL_LINEAR, rank=5)
    adapter = read_adapter(folder, ModelPlan.of(load_model_config(checkpoint)))
    on_cpu, on_gpu = decoders(checkpoint, "int8")
    assert isinstance(on_gpu, CudaDecoder)
    on_gpu.warm_up()
    plain = logits(on_gpu)
    for decoder in (on_cpu, on_gpu):
        decoder.take_adapter(adapter)
    expected, found = (logits(decoder, adapter.digest) for decoder in (on_cpu, on_gpu))
    assert (found - expected).std() < 0.06 * expected.std()
    assert (found - plain).std() > 0.1 * expected.std()


@pytest.mark.long
def test_models_with_states(tmp_path: Path) -> None:
    said = []
    for decoder in decoders(plain_of(tmp_path, "qwen3_next"), "int8"):
        request = make_request(TOKENS)
        make_node(decoder).generate([request], 2)
        said.append(request.output_token_ids)
    assert len(said[1]) == len(said[0])


def test_the_head_is_quantised_beside_an_embedding_that_is_not(tmp_path: Path) -> None:
    """Of one tensor, which is decoded for the one."""
    checkpoint = q4_k_m_of(tmp_path)
    plan, weights = loaded(checkpoint)
    assert isinstance(weights.lm_head, QuantisedLinear)
    assert plan.coded["lm_head"].name == "8 bits by 32"
    tensors = open_tensors(checkpoint, plan.expected(), ignored=plan.ignored())
    decoded = tensors["model.embed_tokens.weight"][()]
    assert torch.equal(weights.embedding, decoded.bfloat16())
    x = torch.randn(2, plan.config.hidden_size).bfloat16()
    torch.testing.assert_close(
        weights.lm_head(x).float(), x.float() @ decoded.T, rtol=0.02, atol=0.1
    )


@pytest.mark.parametrize("quantization", matrix(["int8", "int4", "fp8"], 1))
def test_ranks_have_the_bits_of_the_whole(quantization: str, tmp_path: Path) -> None:
    """Rows of a matrix are divided, and so are the columns of what they make."""
    checkpoint = plain_of(tmp_path)
    _, whole = loaded(checkpoint, quantization)
    x = torch.randn(3, whole.embedding.shape[1]).bfloat16()
    parts = []
    for rank in range(2):
        mlp = loaded(checkpoint, quantization, Shard(rank, 2))[1].layers[0].mlp
        assert isinstance(mlp, Mlp)
        parts.append(mlp.gate_up(x).chunk(2, dim=1))
    mlp = whole.layers[0].mlp
    assert isinstance(mlp, Mlp)
    halves = [torch.cat(half, dim=1) for half in zip(*parts, strict=True)]
    assert torch.equal(torch.cat(halves, dim=1), mlp.gate_up(x))


@pytest.mark.parametrize("form", matrix(["int8", "int4", "fp8"], 1))
def test_bytes_are_counted_without_being_allocated(form: str) -> None:
    plan = ModelPlan.of(
        parse_model_config(JsonFields(config_of(SHAPES["8b"]), "8b")), WHOLE, FORMS[form]
    )
    weights = allocate_weights(plan, torch.bfloat16, torch.device("meta"), device_linear)
    found = sum(tensor.nbytes for tensor in tensors_of(replace(weights, slots={})))
    assert weight_bytes(plan, BF16) == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize(
    ("damage", "said"), [(float("nan"), "holds a NaN or an infinity in row 3"), (0.0, "")]
)
def test_damaged_weights_are_found(damage: float, said: str, tmp_path: Path) -> None:
    path = plain_of(tmp_path).path
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = damage
    save_file(tensors, path / "model.safetensors")
    for quantization in ("int8", "int4"):
        if said:
            with pytest.raises(ModelError, match=said):
                loaded(resolve_checkpoint(str(path)), quantization)
        else:
            loaded(resolve_checkpoint(str(path)), quantization)
