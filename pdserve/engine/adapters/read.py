"""Reads an adapter in the form of PEFT: all of its tensors are accounted for, or it is refused."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.engine.adapters.adapter import Adapter, LowRank, TrainedTokens
from pdserve.engine.adapters.config import AdapterConfig, read_config
from pdserve.engine.adapters.dora import normalised
from pdserve.engine.adapters.targets import Target, Targets, of_experts
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.weights.finite import check_finite
from pdserve.engine.weights.stored.tensors import listed
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.shared.errors import AdapterRefused, ModelError

WEIGHTS_FILE: Final = "adapter_model.safetensors"
EMBEDDING: Final = "model.embed_tokens"
HEAD: Final = "lm_head"
PREFIX: Final = "base_model.model."
_FUSED_INSIDE: Final = ".base_layer"  # of two adapted parameters of one module, the first
_DIGEST_CHARS: Final = 32
_TENSOR: Final = re.compile(
    r"(?P<module>.+?)\.(?P<kind>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A"
    r"|lora_embedding_B|lora_magnitude_vector(\.weight)?|base_layer\.weight"
    r"|token_adapter\.trainable_tokens_delta|weight)"
)
_LENGTHS: Final = "lora_magnitude_vector"
_TRAINED: Final = "token_adapter.trainable_tokens_delta"
_KINDS: Final = {
    "lora_embedding_A": "lora_A.weight",
    "lora_embedding_B": "lora_B.weight",
    f"{_LENGTHS}.weight": _LENGTHS,
}
_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)


def read_adapter(
    folder: Path,
    plan: ModelPlan,
    max_bytes: int | None = None,
    checkpoint: Checkpoint | None = None,
) -> Adapter:
    """Read an adapter, and check it against the model.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        plan: of the whole model.
        max_bytes: of its tensors; None: any.
        checkpoint: of the model, to which DoRA refers; None: it is refused.

    Raises:
        AdapterRefused: it is damaged, of another model, or of a kind that is not served; says which
            field or tensor.
    """
    if plan.config.recurrent is not None:
        raise AdapterRefused(f"{folder}: adapters of models with states are not served")
    try:
        config, file = read_config(folder), folder / WEIGHTS_FILE
        tensors = _tensors(file, max_bytes)
        return _Reading(config, plan, file, tensors, checkpoint).adapter()
    except AdapterRefused:
        raise
    except ModelError as error:
        raise AdapterRefused(str(error)) from error


def _tensors(file: Path, max_bytes: int | None) -> dict[str, Tensor]:
    if not file.is_file():
        raise AdapterRefused(
            f"{file.parent} has no {file.name}: load it in PEFT, and save_pretrained() it"
        )
    try:
        num_bytes = file.stat().st_size
        if max_bytes is not None and num_bytes > max_bytes:
            raise AdapterRefused(f"{file} has {num_bytes} bytes; it may have {max_bytes}")
        with safe_open(file, framework="pt", device="cpu") as opened:
            tensors = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
    except (SafetensorError, OSError) as error:
        raise AdapterRefused(f"{file} is damaged or cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise AdapterRefused(f"{file}: {name} is of type {tensor.dtype}, which is not served")
    check_finite(tensors)
    return tensors


def _digest(config: AdapterConfig, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(config.canonical)
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:_DIGEST_CHARS]


def _fits(target: Target, kinds: Mapping[str, Tensor]) -> bool:
    """Whether matrices A and B, if they are there, have the target's columns and rows."""
    a = kinds.get("lora_A.weight")
    return (
        a is not None
        and tuple(a.shape[1:]) == (target.num_in,)
        and len(kinds.get("lora_B.weight", a)) == target.num_out
    )


@dataclass(slots=True)
class _Reading:
    config: AdapterConfig
    plan: ModelPlan
    file: Path
    tensors: dict[str, Tensor]
    checkpoint: Checkpoint | None  # of the model
    modules: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # name |-> kind |-> tensor
    lengths: dict[str, Tensor] = field(default_factory=dict)  # of DoRA's merged rows, by part
    targets: Targets = field(init=False)

    def __post_init__(self) -> None:
        self.targets = Targets.of(self.plan)

    def adapter(self) -> Adapter:
        self._sort()
        parts: dict[str, LowRank] = {}
        ends = {name: self.modules.pop(name, {}) for name in (EMBEDDING, HEAD)}
        for module, kinds in self.modules.items():
            parts |= self._parts(module, kinds)
        if self.lengths:
            if self.checkpoint is None:
                raise AdapterRefused(f"{self.file}: DoRA needs the model's own weights")
            parts |= dict(normalised(parts, self.lengths, self.checkpoint, self.plan))
        if not parts and all(not kinds for kinds in ends.values()):
            raise AdapterRefused(f"{self.file} holds no adapted module")
        trained, trained_head = (self._trained(name, ends[name]) for name in (EMBEDDING, HEAD))
        size = (self.plan.config.vocab_size, self.plan.config.hidden_size)
        embedding, own_embedding = self._end(EMBEDDING, ends[EMBEDDING], (size[1], size[0]))
        head, own_head = self._end(HEAD, ends[HEAD], size)
        if trained is not None and self.plan.config.ties_embeddings and own_head is None:
            trained_head = trained
        return Adapter(
            digest=_digest(self.config, self.tensors),
            parts=parts,
            embedding=embedding,
            head=head,
            own_embedding=own_embedding,
            own_head=own_head,
            trained_embedding=trained,
            trained_head=trained_head,
            invocation=self.config.invocation,
            base_embedding=self._base_embedding(ends),
            num_bytes=sum(4 * tensor.numel() for tensor in self.tensors.values()),
        )

    def _base_embedding(self, ends: Mapping[str, Mapping[str, Tensor]]) -> Tensor | None:
        found = ends[EMBEDDING].get("base_layer.weight")
        if found is None and self.plan.config.ties_embeddings:
            found = ends[HEAD].get("base_layer.weight")
        return found

    def _sort(self) -> None:
        """Bring the tensors of each module together; refuse those of no known form."""
        unknown = []
        for name, tensor in self.tensors.items():
            found = _TENSOR.fullmatch(name.removeprefix(PREFIX))
            if found is None or not name.startswith(PREFIX):
                unknown.append(name)
                continue
            kind = _KINDS.get(found["kind"], found["kind"])
            self.modules.setdefault(found["module"], {})[kind] = tensor
        if unknown:
            raise AdapterRefused(
                f"{self.file} holds {listed(unknown)}, which is not served: matrices A and B, "
                "lora_bias, trained tokens, and whole embeddings and output matrices are"
            )

    def _parts(self, module: str, kinds: Mapping[str, Tensor]) -> dict[str, LowRank]:
        whole = module.removesuffix(_FUSED_INSIDE)
        if whole in self.targets.experts:
            return self._experts(whole, module, kinds)
        target = self.targets.modules.get(module)
        if target is None or "weight" in kinds or "base_layer.weight" in kinds:
            what = "which the model does not have" if target is None else "and replaces it whole"
            raise AdapterRefused(
                f"{self.file} adapts {module}, {what}; served are its attention, MLP and experts"
            )
        if target.is_absorbed and (self.config.has_bias or self.config.uses_dora):
            kind = "DoRA" if self.config.uses_dora else "lora_bias"
            raise AdapterRefused(
                f"{self.file}: {kind} of {module} is not served, whose keys queries take in"
            )
        end = ".weight" if target.is_router and self.config.has_parameters else ""
        shape = (target.num_out, target.num_in)
        found = target.parts(self._low_rank(module, kinds, shape, module + end))
        if self.config.uses_dora:
            self.lengths |= target.split(kinds[_LENGTHS])
        return found

    def _experts(
        self, experts: str, module: str, kinds: Mapping[str, Tensor]
    ) -> dict[str, LowRank]:
        """Of one of the two fused parameters; alone, its shape says which of them it is."""
        fused = self.targets.experts[experts]
        first, last = fused
        is_both = experts + _FUSED_INSIDE in self.modules and experts in self.modules
        is_first = module != experts or (not is_both and _fits(fused[first][0], kinds))
        name = first if is_first else last
        targets = fused[name]
        shape = (targets[0].num_out, targets[0].num_in)
        found = self._low_rank(module, kinds, shape, f"{experts}.{name}_proj", len(targets))
        if found.bias is not None:
            raise AdapterRefused(f"{self.file}: {module} has a bias, which experts do not")
        return of_experts(targets, found.a, found.b)

    def _low_rank(
        self,
        module: str,
        kinds: Mapping[str, Tensor],
        shape: tuple[int, int],
        patterned: str,
        count: int = 1,
    ) -> LowRank:
        """Return A, and B and bias times the scale.

        Args:
            module: whose they are.
            kinds: its tensors.
            shape: of the adapted matrix.
            patterned: its name for the patterns of the config.
            count: of matrices that it has, of as many ranks each.
        """
        num_out, num_in = shape
        rank = self.config.rank_of(patterned) * count
        sizes: dict[str, tuple[int, ...]] = {
            "lora_A.weight": (rank, num_in),
            "lora_B.weight": (num_out, rank),
        }
        if self.config.has_bias:
            sizes["lora_B.bias"] = (num_out,)
        if self.config.uses_dora:
            sizes[_LENGTHS] = (num_out,)
            if count > 1 or patterned in (EMBEDDING, HEAD):
                raise AdapterRefused(
                    f"{self.file}: DoRA of {module} is not served, but that of attention and MLPs"
                )
        for kind, expected in sizes.items():
            if kind not in kinds:
                raise AdapterRefused(f"{self.file} lacks {kind} of {module}")
            if (found := tuple(kinds[kind].shape)) != expected:
                raise AdapterRefused(
                    f"{self.file}: {kind} of {module} has the shape {list(found)}, but for this "
                    f"model and rank {rank // count} it is {list(expected)}"
                )
        if foreign := kinds.keys() - sizes.keys() - {"base_layer.weight"}:
            raise AdapterRefused(
                f"{self.file} holds {listed(foreign)} of {module}, for which "
                f"{self.config.where} does not ask"
            )
        scale = self.config.scale_of(patterned)
        bias = kinds.get("lora_B.bias")
        return LowRank(
            kinds["lora_A.weight"].float(),
            kinds["lora_B.weight"].float() * scale,
            None if bias is None else bias.float() * scale,
        )

    def _trained(self, module: str, kinds: dict[str, Tensor]) -> TrainedTokens | None:
        """Take the rows of trained tokens from what it has of a module."""
        ids, rows = self.config.trained_in(module), kinds.pop(_TRAINED, None)
        if rows is None and not ids:
            return None
        if kinds:
            raise AdapterRefused(f"{self.file} both trains tokens of {module} and adapts it")
        shape = (len(ids), self.plan.config.hidden_size)
        if rows is None or tuple(rows.shape) != shape:
            has = "nothing" if rows is None else list(rows.shape)
            raise AdapterRefused(
                f"{self.file} has {has} as {module}.{_TRAINED}, but trainable_token_indices ask "
                f"for {list(shape)}"
            )
        if max(ids) >= self.plan.config.vocab_size:
            raise AdapterRefused(
                f"{self.file} trains token {max(ids)}, but the model has "
                f"{self.plan.config.vocab_size}: vocabularies that grew are not served"
            )
        return TrainedTokens(ids, rows)

    def _end(
        self, module: str, kinds: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> tuple[LowRank | None, Tensor | None]:
        """Return what is added to the embedding or the head, or what takes its place."""
        if not kinds:
            return None, None
        size = (self.plan.config.vocab_size, self.plan.config.hidden_size)
        for whole in ("weight", "base_layer.weight"):
            if whole in kinds and tuple(kinds[whole].shape) != size:
                raise AdapterRefused(
                    f"{self.file}: {module} has the shape {list(kinds[whole].shape)}, but the "
                    f"model's is {list(size)}: vocabularies that grew are not served"
                )
        if "weight" in kinds:
            if len(kinds) > 1:
                raise AdapterRefused(f"{self.file} both adapts {module} and replaces it")
            return None, kinds["weight"]
        return self._low_rank(module, kinds, shape, module), None
