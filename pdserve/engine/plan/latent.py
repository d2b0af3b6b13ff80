"""What mixes tokens in latent attention (`models/latent.py`), as one rank has it.

query_latent  what queries are made of, if it is not the residual stream
queries       of the rank's heads: what has no position, and then what is rotated
latent        the row that is kept of a token: all ranks have it
heads         of each its key, which makes a query one that latent rows score, and its value

And `mixer_out`, of the heads' values.
"""

from __future__ import annotations

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.latent import LatentShape
from pdserve.engine.plan.forms import WeightForm, fitting_form
from pdserve.engine.plan.matrix import Matrices, Matrix, Part, TensorRows, mixer_out
from pdserve.engine.plan.norm import Norm
from pdserve.engine.ranks.shard import Shard


class LatentMixer:
    """That of one layer."""

    def __init__(
        self, config: ModelConfig, shape: LatentShape, index: int, shard: Shard, form: WeightForm
    ) -> None:
        self._config = config
        self._shape = shape
        self._shard = shard
        self._form = form
        self._layer = f"model.layers.{index}."
        rope, own = config.ropes[index], shard.share(config.num_heads)
        self._rope_order = () if rope is None else rope.head_order(shape.rope_dim)
        self._heads = range(own.start, own.stop)

    def norms(self) -> dict[str, Norm]:
        """Of the latent vectors."""
        shape, attention = self._shape, f"{self._layer}self_attn."
        norms = {"latent_norm": Norm(f"{attention}kv_a_layernorm.weight", shape.rank)}
        if shape.query_rank is not None:
            norms["query_latent_norm"] = Norm(f"{attention}q_a_layernorm.weight", shape.query_rank)
        return norms

    def matrices(self) -> Matrices:
        """All but those of heads."""
        config, shape = self._config, self._shape
        hidden, has_bias = range(config.hidden_size), config.has_qkv_bias
        values = self._of_heads(shape.value_dim)
        adds_bias = config.has_o_bias and self._shard.rank == 0
        matrices = {
            "latent": self._matrix("latent", self._rows(), hidden, has_bias=has_bias),
            **mixer_out(
                self._layer, "self_attn.o_proj", hidden, values, self._form, has_bias=adds_bias
            ),
        }
        if shape.query_rank is None:
            return matrices | {"queries": self._matrix("queries", self._queries("q_proj"), hidden)}
        rank = range(shape.query_rank)
        down = Part(f"{self._layer}self_attn.q_a_proj", rank)
        return matrices | {
            "query_latent": self._matrix("query_latent", down, hidden, has_bias=has_bias),
            "queries": self._matrix("queries", self._queries("q_b_proj"), rank),
        }

    def heads(self) -> tuple[Matrices, ...]:
        """The key and the value of each head, parts of tensors that have those of all."""
        nope, value = range(self._shape.nope_dim), range(self._shape.value_dim)
        rank, tensor = range(self._shape.rank), f"{self._layer}self_attn.kv_b_proj"
        heads = []
        for head in self._heads:
            of_key, of_value = self._places(head)
            key = Part(f"{tensor}.{head}.key", rank, of_key)
            made = Part(f"{tensor}.{head}.value", value, of_value)
            heads.append(
                {
                    "key": self._matrix(f"head.{head}.key", key, nope),
                    "value": self._matrix(f"head.{head}.value", made, rank),
                }
            )
        return tuple(heads)

    def _places(self, head: int) -> tuple[TensorRows, TensorRows]:
        """Where files have a head's key and value."""
        shape, attention = self._shape, f"{self._layer}self_attn."
        if shape.splits_heads:
            key = TensorRows(f"{attention}k_b_proj", head * shape.rank)
            return key, TensorRows(f"{attention}v_b_proj", head * shape.value_dim)
        tensor, first = f"{attention}kv_b_proj", head * (shape.nope_dim + shape.value_dim)
        key = TensorRows(tensor, first, is_transposed=True)
        return key, TensorRows(tensor, first + shape.nope_dim)

    def _queries(self, tensor: str) -> Part:
        size = self._shape.query_dim
        return self._ordered(f"{self._layer}self_attn.{tensor}", self._of_heads(size), size)

    def _rows(self) -> Part:
        size = self._shape.row_dim
        return self._ordered(f"{self._layer}self_attn.kv_a_proj_with_mqa", range(size), size)

    def _ordered(self, name: str, rows: range, head_dim: int) -> Part:
        order = self._shape.head_order(head_dim, self._rope_order)
        return Part(name, rows, TensorRows(name, 0, order) if order else None)

    def _of_heads(self, head_dim: int) -> range:
        return range(self._heads.start * head_dim, self._heads.stop * head_dim)

    def _matrix(self, name: str, part: Part, columns: range, *, has_bias: bool = False) -> Matrix:
        form = fitting_form(self._form, len(columns))
        return Matrix(f"{self._layer}{name}", (part,), columns, form, has_bias=has_bias)
