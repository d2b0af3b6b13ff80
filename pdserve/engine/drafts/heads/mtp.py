"""Layers of a checkpoint that predict a token further each (MTP), computed by the model's decoder.

The entrance of one is not an embedding: of a token's embedding and the state of what is before the
layer, both normalised, `eh_proj` makes a row. So the decoder is given a table of the rows of a
step, of which token i looks up row i. Positions are those in what the layers have seen of a stream,
since attention knows distances only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.drafts.heads.head import BLOCK_TOKENS, HeadRows, laid_out
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.layers import rms_norm, torch_dtype
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.native.decoder import NativeDecoder
from pdserve.engine.native.load import load_native_weights
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.plan.forms import ActivationDtype
from pdserve.engine.plan.further import FurtherLayer
from pdserve.engine.steps.batch import WantedStates
from pdserve.engine.weights.finite import check_finite
from pdserve.engine.weights.opening import open_tensors
from pdserve.kv import KvLayout
from pdserve.model_files.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class MtpPlan:
    """They, as known before their weights are read."""

    checkpoint: Checkpoint
    layers: tuple[FurtherLayer, ...]
    activations: ActivationDtype
    layout: KvLayout  # of the KV of one
    num_blocks: int  # of that
    most_tokens: int  # of a stream
    kernels: str = ""  # as `load_decoder`

    @property
    def block_bytes(self) -> int:
        """Memory of a block, of all of them."""
        return len(self.layers) * self.layout.block_bytes


@dataclass(frozen=True, slots=True)
class Entrance:
    """What makes rows for the layer, in float32 but for the embedding."""

    embedding: Tensor  # [vocab_size, hidden]
    embedding_norm: Tensor  # [hidden]
    state_norm: Tensor  # [hidden]
    projection: Tensor  # [hidden, 2 * hidden]
    eps: float

    @classmethod
    def load(cls, plan: MtpPlan, layer: FurtherLayer, embedding: Tensor) -> Entrance:
        """Read it. Raises ModelError, as open_tensors; or a value is not finite."""
        stored = open_tensors(plan.checkpoint, layer.entrance(), ignored=layer.ignored())
        tensors = {name: stored[name][:].float() for name in layer.entrance()}
        check_finite(tensors)
        embedding_norm, state_norm, projection = tensors.values()
        return cls(embedding, embedding_norm, state_norm, projection, layer.config.rms_norm_eps)

    def rows(self, tokens: Tensor, states: Tensor) -> Tensor:
        """[n] ids, and [n, hidden] of the token before each -> [n, hidden]."""
        embedded = functional.embedding(tokens, self.embedding).float()
        normed = [
            rms_norm(embedded, self.embedding_norm, self.eps),
            rms_norm(states, self.state_norm, self.eps),
        ]
        return functional.linear(torch.cat(normed, dim=-1), self.projection)


class MtpLayer:
    """A loaded one."""

    def __init__(self, entrance: Entrance, table: Tensor, decoder: Decoder, kv: KvCache) -> None:
        """
        Args:
            entrance: of the layer.
            table: [vocab_size, hidden], in which the decoder looks tokens up.
            decoder: of the layer.
            kv: of the layer.
        """
        self._entrance = entrance
        self._table = table
        self._decoder = decoder
        self._kv = kv

    @classmethod
    def load(
        cls,
        plan: MtpPlan,
        layer: FurtherLayer,
        cache: PackedCache | None,
        on_progress: Callable[[float], None],
    ) -> MtpLayer:
        """Read it from its checkpoint. Raises as load_decoder."""
        dtype = torch_dtype(plan.activations)
        weights = load_native_weights(plan.checkpoint, layer, dtype, cache, on_progress)
        assert isinstance(weights.embedding, Tensor), "it is planned as no matrix"
        table = torch.empty_like(weights.embedding)  # whose pages cost nothing until they are used
        decoder = NativeDecoder(layer.config, replace(weights, embedding=table), plan.kernels)
        entrance = Entrance.load(plan, layer, weights.embedding)
        return cls(entrance, table, decoder, kv_of(plan))

    def step(self, parts: Sequence[HeadRows]) -> list[tuple[int, Tensor]]:
        """As Head.step, of all streams together."""
        states, counts = torch.cat([part.states for part in parts]), [len(p.tokens) for p in parts]
        batch, rows = laid_out(parts), torch.arange(len(states))
        made = self._entrance.rows(batch.token_ids, states)
        self._table[: len(rows)] = made.to(self._table.dtype)
        after = WantedStates(rows, torch.empty(states.shape))
        logits = self._decoder.logits(replace(batch, token_ids=rows, states=after), self._kv.pool)
        assert logits is not None, "rows are sampled"
        return [*zip(logits.argmax(-1).tolist(), torch.split(after.out, counts), strict=True)]


class MtpHead:
    """All of a checkpoint. Implements `Head`."""

    taps: tuple[int, ...] = ()

    def __init__(self, plan: MtpPlan, layers: Sequence[MtpLayer]) -> None:
        """`layers`: in the order in which they draft; a block is one of each."""
        self.name = f"mtp-1:{plan.checkpoint.revision}"
        self.width = plan.layers[0].config.hidden_size
        self.num_layers = len(layers)
        self.most_tokens = plan.most_tokens
        self.pool = BlockPool(plan.num_blocks, BLOCK_TOKENS, prefix_cache=False)
        self.block_bytes = plan.block_bytes
        self._layers = layers

    @classmethod
    def load(
        cls, plan: MtpPlan, cache: PackedCache | None, on_progress: Callable[[float], None]
    ) -> MtpHead:
        """Read them from their checkpoint. Raises as load_decoder."""
        return cls(plan, [MtpLayer.load(plan, one, cache, on_progress) for one in plan.layers])

    def entered(self, rows: Tensor) -> Tensor:
        """As Head.entered."""
        return rows

    @torch.inference_mode()
    def step(self, parts: Sequence[HeadRows], layer: int = 0) -> list[tuple[int, Tensor]]:
        """As Head.step."""
        return self._layers[layer].step(parts)


def kv_of(plan: MtpPlan) -> KvCache:
    """Make the KV of a layer."""
    return KvCache(plan.layout, plan.num_blocks, torch.device("cpu"))
