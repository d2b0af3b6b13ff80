"""A plane: one kind of KV that tokens have, such as their keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plane:
    """What a token costs in one kind of KV, in the layers and heads that a pool has of it."""

    name: str
    layers: range  # of the model
    heads: range  # of the model, in each of these layers
    row_bytes: int  # of one token in one head of one layer

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return len(self.heads) * self.row_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return len(self.layers) * self.layer_bytes
