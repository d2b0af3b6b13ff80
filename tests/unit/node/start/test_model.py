"""What a node is going to serve, as its peers see it."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.handshake import KvIdentity
from pdserve.engine.cuda.attention import catalog
from pdserve.kv import KvDtype
from pdserve.node.start.model import NodeModel, packed_cache, plan_model
from pdserve.node.start.sizing import DeviceType, auto_block_size
from pdserve.settings.config import CheckpointConfig, EngineConfig, NodeConfig
from pdserve.shared.errors import ConfigError, LayoutMismatch
from tests.checkpoints import make_checkpoint
from tests.fakes.cards import show_cards


def planned(**engine: str | int) -> NodeModel:
    return plan_model(NodeConfig(engine=EngineConfig(**({"device": "cpu"} | engine))))


def identity(model: NodeModel) -> KvIdentity:
    return KvIdentity(model.checkpoint.model_id, model.revision, model.layout)


def test_kv_of_quantised_weights_is_not_exchanged_with_that_of_others() -> None:
    plain, quantised = identity(planned()), identity(planned(quantization="int8"))
    plain.check_peer("peer", plain.fingerprint, plain.layout)
    quantised.check_peer("peer", quantised.fingerprint, quantised.layout)
    for ours, theirs in [(plain, quantised), (quantised, plain)]:
        with pytest.raises(LayoutMismatch, match="peer"):
            ours.check_peer("peer", theirs.fingerprint, theirs.layout)


def test_kv_of_another_arithmetic_is_not_exchanged() -> None:
    ours, theirs = (
        identity(planned(dtype="bfloat16", kernels=kernels))
        for kernels in ("portable", "amx_emulated")
    )
    with pytest.raises(LayoutMismatch, match="peer"):
        ours.check_peer("peer", theirs.fingerprint, theirs.layout)


def test_kv_of_other_formats_is_not_exchanged() -> None:
    models = [planned(), planned(kv_dtype="int8"), planned(kv_dtype="fp8")]
    assert [model.layout.dtype for model in models[1:]] == [KvDtype.INT8, KvDtype.FP8]
    assert {model.activations for model in models} == {models[0].activations}
    assert len({model.revision for model in models}) == len(models)
    assert "+kv-int8+" in models[1].revision
    for ours, theirs in permutations(map(identity, models), 2):
        with pytest.raises(LayoutMismatch, match="cannot be laid out as"):
            ours.check_peer("peer", theirs.fingerprint, theirs.layout)


def test_kv_that_is_rounded_otherwise_is_not_exchanged() -> None:
    models = [planned(), planned(wire_dtype="int8"), planned(wire_dtype="fp8")]
    assert [model.layout.rounded_to for model in models] == [None, KvDtype.INT8, KvDtype.FP8]
    assert len({model.revision for model in models}) == len(models)
    assert "+wire-int8+" in models[1].revision
    for ours, theirs in permutations(map(identity, models), 2):
        with pytest.raises(LayoutMismatch, match="cannot be laid out as"):
            ours.check_peer("peer", theirs.fingerprint, theirs.layout)


def test_rounding_is_refused_where_nothing_would_be_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"wire_dtype int8 is for KV .* kv_dtype is int8: leave"):
        planned(kv_dtype="int8", wire_dtype="int8")
    show_cards(monkeypatch, [1 << 30] * 2)
    with pytest.raises(ConfigError, match=r"wire_dtype fp8 is for CPUs, .* cuda"):
        planned(device="cuda:1", kv_memory="64MiB", wire_dtype="fp8")


def test_kernels_that_this_cpu_lacks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kernels 'avx9': this CPU can run .*portable"):
        planned(kernels="avx9")


def test_quantisation_on_a_gpu_takes_our_kernels_and_half_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    show_cards(monkeypatch, [1 << 30] * 2)
    on_gpu: dict[str, Any] = {"device": "cuda:1", "kv_memory": "64MiB", "quantization": "int8"}
    with pytest.raises(ConfigError, match=r"int8 with dtype float32 is for CPUs, .* cuda"):
        planned(**on_gpu, dtype="float32")
    model = planned(**on_gpu)
    assert model.arithmetic.endswith("+int8")
    assert model.weights.endswith("as int8, activations as 8-bit integers, 16-bit around outliers")
    monkeypatch.setattr(catalog, "triton_missing", lambda: "there is no Triton")
    with pytest.raises(ConfigError, match=r"int8 on a GPU takes our kernels: there is no Triton"):
        planned(**on_gpu)


def test_kv_in_codes_on_a_gpu_is_of_plain_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_cards(monkeypatch, [1 << 30] * 2)
    on_gpu: dict[str, Any] = {"device": "cuda:1", "kv_memory": "64MiB", "kv_dtype": "fp8"}
    assert "+kv-fp8" in planned(**on_gpu).revision
    model = CheckpointConfig(model=str(make_checkpoint(tmp_path, "deepseek_v3")))
    with pytest.raises(ConfigError, match=r"fp8 of latent attention is for CPUs, .* cuda"):
        plan_model(NodeConfig(checkpoint=model, engine=EngineConfig(**on_gpu)))


def test_what_states_lack_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CheckpointConfig(model=str(make_checkpoint(tmp_path, "qwen3_next")))

    def states(device: str, **engine: str | int) -> NodeModel:
        made = EngineConfig(**({"device": device, "kv_memory": "64MiB"} | engine))
        return plan_model(NodeConfig(checkpoint=model, engine=made))

    assert states("cpu", tensor_parallel=2).layout.state_bytes
    with pytest.raises(ConfigError, match=r"leave out pipeline_parallel and rank_hosts$"):
        states("cpu", pipeline_parallel=2)
    show_cards(monkeypatch, [1 << 30] * 2)
    assert states("cuda:0").layout.state_bytes
    with pytest.raises(ConfigError, match=r"leave out tensor_parallel on GPUs$"):
        states("cuda:0", tensor_parallel=2)


def test_float16_is_for_gpus() -> None:
    with pytest.raises(ConfigError, match=r"float16 is for GPUs, .* ask for bfloat16"):
        planned(dtype="float16")


def test_more_kv_than_the_machine_has_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'"4000TiB" is more than all memory .*MiB\)'):
        planned(kv_memory="4000TiB")


@pytest.mark.parametrize(
    ("head_dim", "dtype", "device", "max_model_len", "block_size"),
    [
        (64, KvDtype.BFLOAT16, "cpu", 1 << 17, 64),
        (64, KvDtype.FLOAT32, "cpu", 1 << 17, 32),
        (128, KvDtype.BFLOAT16, "cpu", 1 << 17, 32),
        (96, KvDtype.BFLOAT16, "cpu", 1 << 17, 32),
        (256, KvDtype.BFLOAT16, "cpu", 1 << 17, 16),
        (256, KvDtype.FLOAT32, "cpu", 1 << 17, 16),
        (1 << 14, KvDtype.FLOAT32, "cpu", 1 << 17, 16),
        (8, KvDtype.BFLOAT16, "cpu", 1 << 17, 64),
        (64, KvDtype.BFLOAT16, "cpu", 4096, 64),
        (64, KvDtype.BFLOAT16, "cpu", 2048, 32),
        (64, KvDtype.BFLOAT16, "cpu", 256, 16),
        (64, KvDtype.BFLOAT16, "cuda", 1 << 17, 16),
    ],
)
def test_a_cpu_reads_kv_in_long_runs(
    head_dim: int, dtype: KvDtype, device: DeviceType, max_model_len: int, block_size: int
) -> None:
    assert auto_block_size(head_dim * dtype.itemsize, device, max_model_len) == block_size


def test_a_block_size_that_is_named_is_taken() -> None:
    assert planned().layout.block_size == 32  # the demo model's context is short
    assert planned(block_size=24).layout.block_size == 24


def test_where_packed_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = packed_cache(EngineConfig(packed_limit="3GiB"))
    assert cache is not None
    assert (cache.folder, cache.limit_bytes) == (tmp_path / "pdserve" / "weights", 3 << 30)
    assert packed_cache(EngineConfig(packed_limit="0")) is None
