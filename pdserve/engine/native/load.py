"""Loads a checkpoint into the weights of the native decoder: packed once, then mapped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.parameters import tensor_shapes
from pdserve.engine.native.linear import PackedLinear, WeightKind, empty_packed, pack_rows
from pdserve.engine.native.packed_cache import Arrays, PackedCache, packed_arrays
from pdserve.engine.native.packed_file import FORMAT
from pdserve.engine.native.sources import (
    ALL,
    EMBEDDING,
    FINAL_NORM,
    ExpertsSource,
    MatrixSource,
    MlpSource,
    head_source,
    layer_source,
)
from pdserve.engine.native.weights import NativeExperts, NativeLayer, NativeMlp, NativeWeights
from pdserve.engine.ranks.shard import WHOLE, Shard
from pdserve.engine.weights.finite import check_finite
from pdserve.engine.weights.tensors import open_tensors
from pdserve.model_files.checkpoint import Checkpoint

Progress = Callable[[float], None]  # called with the loaded share, from 0 to 1
Tensors = Mapping[str, Tensor]


def load_native_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    kind: WeightKind,
    cache: PackedCache | None,
    on_progress: Progress,
    shard: Shard = WHOLE,
) -> NativeWeights:
    """Load the weights of a checkpoint, from the cache if they are there.

    Args:
        checkpoint: the checkpoint to load.
        config: of the same checkpoint.
        dtype: of activations, and of the embedding.
        kind: how to store the matrices.
        cache: where packed weights are kept; None packs them into memory.
        on_progress: called after each matrix, from this thread; may raise to abort loading.
        shard: the rank whose share is loaded; of the files, only that share is read.

    Raises:
        ModelError: as open_tensors; or a value is not finite.
    """
    files = checkpoint.weight_files()
    tensors = open_tensors(files, tensor_shapes(config), ties_embeddings=config.ties_embeddings)
    packing = _Packing(tensors, config, dtype, kind, on_progress, shard)
    identity = _identity(checkpoint, files, config, dtype, kind, shard)
    name = f"{checkpoint.model_id}-{str(dtype).removeprefix('torch.')}"
    if kind is WeightKind.INT8:
        name += f"-{kind}"
    if shard.num_ranks > 1:
        name += f"-rank{shard.rank}of{shard.num_ranks}"
    if shard.num_stages > 1:
        name += f"-stage{shard.stage}of{shard.num_stages}"
    arrays = packed_arrays(cache, name, identity, packing.arrays, lambda: on_progress(0.0))
    on_progress(1.0)
    return _assembled(config, dtype, kind, tensors, arrays, shard)


class _Packing:
    """Creates the arrays one at a time, so that only one is in memory besides its source."""

    def __init__(
        self,
        tensors: Tensors,
        config: ModelConfig,
        dtype: torch.dtype,
        kind: WeightKind,
        on_progress: Progress,
        shard: Shard,
    ) -> None:
        self._tensors = tensors
        self._config = config
        self._dtype = dtype
        self._kind = kind
        self._on_progress = on_progress
        self._shard = shard

    def arrays(self) -> Arrays:
        """Yield (name, array) for all weights, except an embedding usable from the checkpoint."""
        config, shard = self._config, self._shard
        layers = [layer_source(config, index, shard) for index in shard.layers(config)]
        norms = [norm for layer in layers for norm in layer.norms]
        matrices = [matrix for layer in layers for matrix in layer.matrices]
        if shard.is_last_stage:
            norms.append(FINAL_NORM)
            matrices.append(head_source(config, shard))
        if shard.is_first_stage:
            embedding = self._checked(EMBEDDING, shard.share(config.vocab_size))
            if embedding.dtype != self._dtype:
                yield EMBEDDING, embedding.to(self._dtype)
        for name in norms:
            yield name, self._checked(name).float().contiguous()
        total = sum(matrix.num_out * matrix.num_in for matrix in matrices)
        done = 0
        for matrix in matrices:
            yield from self._packed(matrix)
            done += matrix.num_out * matrix.num_in
            self._on_progress(done / total)

    def _checked(self, name: str, part: slice | tuple[slice, slice] = ALL) -> Tensor:
        """Return a tensor that will be read now anyway. Raises ModelError if it is not finite."""
        tensor = self._tensors[name][part]
        check_finite({name: tensor})
        return tensor

    def _packed(self, matrix: MatrixSource) -> Arrays:
        packed = empty_packed(
            _kind_of(matrix, self._kind),
            matrix.num_out,
            matrix.num_in,
            is_gated=matrix.is_gated,
            has_bias=matrix.has_bias,
        )
        first_row = 0
        for part, rows in matrix.rows_of_parts:
            weight = self._checked(f"{part}.weight", (rows, matrix.columns)).contiguous()
            bias = self._checked(f"{part}.bias", rows) if matrix.has_bias else None
            pack_rows(packed, first_row, weight, bias)
            first_row += len(weight)
        yield f"{matrix.name}.weights", packed.weights
        if packed.scales is not None:
            yield f"{matrix.name}.scales", packed.scales
        if packed.bias is not None:
            yield f"{matrix.name}.bias", packed.bias


def _kind_of(matrix: MatrixSource, kind: WeightKind) -> WeightKind:
    return WeightKind.FLOAT32 if matrix.is_float32 else kind


def _identity(
    checkpoint: Checkpoint,
    files: list[Path],
    config: ModelConfig,
    dtype: torch.dtype,
    kind: WeightKind,
    shard: Shard,
) -> str:
    """Return a string of everything that the packed arrays depend on.

    A file is identified by its header, size and modification time. The rest of its content is
    covered by the revision, which samples it.
    """
    stamps = []
    for file in files:
        stat = file.stat()
        stamps.append([file.name, stat.st_size, stat.st_mtime_ns, _header_digest(file)])
    facts = [
        FORMAT,
        str(dtype),
        str(kind),
        checkpoint.revision,
        config.ties_embeddings,
        stamps,
    ]
    if shard != WHOLE:
        facts.append([shard.rank, shard.num_ranks, shard.stage, shard.num_stages])
    return json.dumps(facts)


def _header_digest(file: Path) -> str:
    with file.open("rb") as stream:
        num_bytes = int.from_bytes(stream.read(8), "little")
        return hashlib.blake2b(stream.read(num_bytes), digest_size=16).hexdigest()


def _assembled(
    config: ModelConfig,
    dtype: torch.dtype,
    kind: WeightKind,
    tensors: Tensors,
    arrays: Tensors,
    shard: Shard,
) -> NativeWeights:
    def linear(source: MatrixSource) -> PackedLinear:
        return PackedLinear(
            kind=_kind_of(source, kind),
            num_out=source.num_out,
            num_in=source.num_in,
            weights=arrays[f"{source.name}.weights"],
            scales=arrays.get(f"{source.name}.scales"),
            bias=arrays.get(f"{source.name}.bias"),
            is_gated=source.is_gated,
        )

    def mlp(source: MlpSource) -> NativeMlp:
        return NativeMlp(linear(source.gate_up), linear(source.down))

    def experts(source: ExpertsSource) -> NativeExperts:
        return NativeExperts(
            router=linear(source.router),
            mlps=[mlp(one) for one in source.mlps],
            num_chosen=source.config.num_chosen,
            normalizes_weights=source.config.normalizes_weights,
        )

    layers = []
    for index in shard.layers(config):
        source = layer_source(config, index, shard)
        layers.append(
            NativeLayer(
                attention_norm=arrays[source.attention_norm],
                qkv=linear(source.qkv),
                q_norm=None if source.q_norm is None else arrays[source.q_norm],
                k_norm=None if source.k_norm is None else arrays[source.k_norm],
                attention_out=linear(source.attention_out),
                mlp_norm=arrays[source.mlp_norm],
                mlp=mlp(source.mlp) if isinstance(source.mlp, MlpSource) else None,
                experts=experts(source.mlp) if isinstance(source.mlp, ExpertsSource) else None,
            )
        )
    embedding = None
    if shard.is_first_stage:
        embedding = arrays.get(EMBEDDING, tensors[EMBEDDING][shard.share(config.vocab_size)])
    return NativeWeights(
        dtype=dtype,
        embedding=embedding,
        layers=layers,
        final_norm=arrays[FINAL_NORM] if shard.is_last_stage else None,
        lm_head=linear(head_source(config, shard)) if shard.is_last_stage else None,
    )
