"""An adapter as bytes, from rank 0 to the others: tensors and names, nothing that is executed."""

from __future__ import annotations

import json
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from pdserve.engine.adapters.adapter import Adapter, LowRank, TrainedTokens

_TENSORS = ("own_embedding", "own_head", "base_embedding")
_LOW_RANKS = ("embedding", "head")
_TRAINED = ("trained_embedding", "trained_head")


def to_bytes(adapter: Adapter) -> bytes:
    """Return all of it. Tensors that several parts share are there once."""
    names: dict[tuple[int, tuple[int, ...]], str] = {}
    tensors: dict[str, Tensor] = {}

    def put(tensor: Tensor | None) -> str:
        if tensor is None:
            return ""
        name = names.setdefault((tensor.data_ptr(), tuple(tensor.shape)), f"t{len(names)}")
        tensors[name] = tensor.contiguous()
        return name

    def low_rank(part: LowRank | None) -> list[str] | None:
        return None if part is None else [put(t) for t in (part.a, part.b, part.bias, part.factors)]

    def trained(part: TrainedTokens | None) -> list[Any] | None:
        return None if part is None else [list(part.ids), put(part.rows)]

    said: dict[str, Any] = {name: put(getattr(adapter, name)) for name in _TENSORS}
    said |= {name: low_rank(getattr(adapter, name)) for name in _LOW_RANKS}
    said |= {name: trained(getattr(adapter, name)) for name in _TRAINED}
    said["parts"] = {name: low_rank(part) for name, part in adapter.parts.items()}
    said["invocation"] = list(adapter.invocation)
    said |= {"digest": adapter.digest, "num_bytes": adapter.num_bytes}
    return save(tensors, metadata={"adapter": json.dumps(said)})


def from_file(path: str) -> Adapter:
    """Read what `to_bytes` has made."""
    with safe_open(path, framework="pt", device="cpu") as file:
        said = json.loads(file.metadata()["adapter"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dict

    def low_rank(names: list[str] | None) -> LowRank | None:
        if names is None:
            return None
        a, b, bias, factors = names
        return LowRank(tensors[a], tensors[b], tensors.get(bias), tensors.get(factors))

    def trained(part: list[Any] | None) -> TrainedTokens | None:
        return None if part is None else TrainedTokens(tuple(part[0]), tensors[part[1]])

    fields: dict[str, Any] = {name: tensors.get(said[name]) for name in _TENSORS}
    fields |= {name: low_rank(said[name]) for name in _LOW_RANKS}
    fields |= {name: trained(said[name]) for name in _TRAINED}
    parts = {name: part for name, own in said["parts"].items() if (part := low_rank(own))}
    return Adapter(
        said["digest"],
        parts,
        invocation=tuple(said["invocation"]),
        num_bytes=said["num_bytes"],
        **fields,
    )
