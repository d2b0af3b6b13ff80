"""What the tensors of a checkpoint are stored as, from what its files say of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.identity import weight_header
from pdserve.shared.errors import ModelError

# Mixtral's experts, as llm-compressor names what it has taken out of transformers 5's stacks.
_OF_EXPERT: Final = re.compile(r"(.*\.block_sparse_moe\.experts\.\d+)\.(gate|up|down)_proj\b(.*)")
_PARTS: Final[Mapping[str, str]] = {"gate": "w1", "up": "w3", "down": "w2"}

Types = Mapping[str, tuple[int, int]]  # name of a type |-> tensors, and their bytes


def stored_types(checkpoint: Checkpoint) -> Types:
    """Return them, those with most bytes first. Raises ModelError: a file is damaged."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for _, name, num_bytes in _tensors(checkpoint):
        counts[name] += 1
        sizes[name] += num_bytes
    return {name: (counts[name], num_bytes) for name, num_bytes in sizes.most_common()}


def model_name(name: str) -> str:
    """What the model calls a tensor of a safetensors file, or a module."""
    match = _OF_EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}.{_PARTS[match[2]]}{match[3]}"


def names_in_files(module: str) -> tuple[str, ...]:
    """What files, and what says how they are quantised, may call a module of the model."""
    expert, _, part = module.rpartition(".")
    others = (f"{expert}.{kind}_proj" for kind, own in _PARTS.items() if own == part)
    return (module, *(other for other in others if model_name(other) == module))


def type_names(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return name of a tensor |-> its type. Raises as stored_types."""
    return {model_name(name): kind for name, kind, _ in _tensors(checkpoint)}


def described(types: Types) -> str:
    """For people: 9 Q6_K (9.2 MiB), 109 F32 (0.2 MiB)."""
    return ", ".join(f"{count} {name} ({size_of(size)})" for name, (count, size) in types.items())


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, str, int]]:
    """Yield name, type and bytes of each tensor."""
    if (model := checkpoint.gguf) is not None:
        for tensor in model.tensors.values():
            yield tensor.name, tensor.type.name, tensor.num_bytes
        return
    for file in checkpoint.weight_files():
        try:
            entries = json.loads(weight_header(file))
            entries.pop("__metadata__", None)
            for name, entry in entries.items():
                start, end = entry["data_offsets"]
                yield name, str(entry["dtype"]), int(end) - int(start)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"{file} is damaged: it has no safetensors header") from error


def size_of(num_bytes: int) -> str:
    """For people."""
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 1 << 30 else f"{num_bytes / 2**30:.2f} GiB"
