"""What the tensors of a checkpoint are stored as, from what its files say of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.identity import weight_header
from pdserve.shared.errors import ModelError

# Mixtral's experts: of old in `block_sparse_moe`; those who write what transformers 5 has in memory
# call their parts otherwise (llm-compressor), or the block too (gptqmodel).
_PARTS: Final[Mapping[str, str]] = {"gate": "w1", "up": "w3", "down": "w2"}
_EXPERT: Final = re.compile(
    r"(.+\.)(?:block_sparse_moe|mlp)(\.experts\.\d+\.)(gate|up|down)_proj(\..+)"
)

Types = Mapping[str, tuple[int, int]]  # name of a type |-> tensors, and their bytes


def stored_types(checkpoint: Checkpoint) -> Types:
    """Return them, those with most bytes first. Raises ModelError: a file is damaged."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for _, name, num_bytes in _tensors(checkpoint):
        counts[name] += 1
        sizes[name] += num_bytes
    return {name: (counts[name], num_bytes) for name, num_bytes in sizes.most_common()}


def renaming(checkpoint: Checkpoint) -> Callable[[str], str]:
    """Return what makes names of the model of those that a folder's files have."""
    return _of_mixtral if checkpoint.config().get("model_type") == "mixtral" else str


def _of_mixtral(name: str) -> str:
    if (match := _EXPERT.fullmatch(name)) is not None:
        return f"{match[1]}block_sparse_moe{match[2]}{_PARTS[match[3]]}{match[4]}"
    return name.replace(".mlp.gate.", ".block_sparse_moe.gate.")


def names_in_files(module: str) -> tuple[str, ...]:
    """What files, and what says how they are quantised, may call a module of the model."""
    block, found, expert = module.partition(".block_sparse_moe.")
    expert, _, own = expert.rpartition(".")
    parts = [f"{expert}.{part}_proj" for part, other in _PARTS.items() if found and other == own]
    return (module, *(f"{block}.{of}.{part}" for part in parts for of in (found[1:-1], "mlp")))


def type_names(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return name of a tensor |-> its type. Raises as stored_types."""
    named = renaming(checkpoint) if checkpoint.gguf is None else str
    return {named(name): kind for name, kind, _ in _tensors(checkpoint)}


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
