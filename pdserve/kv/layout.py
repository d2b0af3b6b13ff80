"""The layout of a paged KV pool: its planes, in blocks.

    kv_pool[num_blocks, num_layers, num_planes, num_heads, block_size] of rows

A KV block is one contiguous region across all layers: in each the rows of K, then those of V, each
head-major. Latent attention has one plane, of one head, whose rows are both. So a block is copied
as one span, a range of its layers as one span, and a range of heads as one span per layer and
plane.

A row is what one token has in one head: numbers; or codes of 8 bits, and behind them their scale, a
float32. So a scale goes wherever its token goes, and depends on no other.

A pool that gives back what windows have passed has several blocks for the same tokens, each with
some of the layers (`companions.py`). To all others a block has every layer of the pool.

A layout is sent and compared as numbers of layers and heads. Its planes are made of them in one
place (`planes`); everything else asks the planes, and knows no elements.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import msgspec

from pdserve.kv import need
from pdserve.kv.companions import Place, places
from pdserve.kv.plane import Plane
from pdserve.shared.errors import KvBudgetTooSmall, LayoutMismatch

LAYOUT_VERSION = 2

# A peer's layout is checked against these bounds before anything is computed from it.
_MAX_DIMENSION = 1 << 20
_MAX_BLOCK_BYTES = 1 << 32
_MAX_STATE_BYTES = 1 << 36


_SCALE_BYTES = 4  # of a row of codes


class KvDtype(StrEnum):
    """What keys and values are stored as."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"  # codes
    FP8 = "fp8"  # likewise, e4m3

    @property
    def is_coded(self) -> bool:
        """Whether a row has codes and a scale."""
        return self in (KvDtype.INT8, KvDtype.FP8)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        if self.is_coded:
            return 1
        return 4 if self is KvDtype.FLOAT32 else 2

    def row_elements(self, head_dim: int) -> int:
        """Elements of a row: its scale counts as several."""
        return head_dim + _SCALE_BYTES * self.is_coded


class KvLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """Shape of the KV blocks of one pool.

    A pool may hold a part: a tensor-parallel rank has only some of the model's KV heads, and a
    pipeline stage only some of its layers. All sizes are those of the pool, not of the model.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: KvDtype
    first_kv_head: int = 0  # index in the model of this pool's first KV head
    model_kv_heads: int | None = None  # KV heads of the model; None: all of them are in this pool
    first_layer: int = 0  # index in the model of this pool's first layer
    model_layers: int | None = None  # layers of the model; None: all of them are in this pool
    is_latent: bool = False  # rows are of latent attention: there are no values besides
    windows: tuple[int, ...] = ()  # of each layer, in tokens, 0: none; (): the pool keeps it all
    state_bytes: int = 0  # that a request has besides, in layers that are not counted here
    rounded_to: KvDtype | None = None  # codes: rows hold what these can, to be sent as them

    @classmethod
    def gqa(
        cls, *, layers: int, heads: int, head_dim: int, block_size: int, dtype: KvDtype
    ) -> KvLayout:
        """The KV of a whole model with grouped-query attention: of its layers, and KV heads."""
        return cls(layers, heads, head_dim, block_size, dtype)

    @property
    def total_kv_heads(self) -> int:
        """KV heads of the whole model."""
        return self.num_kv_heads if self.model_kv_heads is None else self.model_kv_heads

    @property
    def end_kv_head(self) -> int:
        """Index in the model of one past this pool's last KV head."""
        return self.first_kv_head + self.num_kv_heads

    @property
    def total_layers(self) -> int:
        """Layers of the whole model."""
        return self.num_layers if self.model_layers is None else self.model_layers

    @property
    def end_layer(self) -> int:
        """Index in the model of one past this pool's last layer."""
        return self.first_layer + self.num_layers

    @property
    def model_shape(self) -> tuple[int, int, int, KvDtype, bool, int, KvDtype | None]:
        """What pools must have in common to exchange KV.

        That is (layers, KV heads, head_dim, dtype, is_latent, state_bytes, rounded_to).
        """
        kind = (self.dtype, self.is_latent, self.state_bytes, self.rounded_to)
        return (self.total_layers, self.total_kv_heads, self.head_dim, *kind)

    def shard(self, rank: int, num_ranks: int) -> KvLayout:
        """The layout of one tensor-parallel rank, given the layout of the whole model.

        With more ranks than KV heads, each head is replicated on consecutive ranks, as Megatron-LM
        and vLLM do.

        Raises:
            LayoutMismatch: neither number, of heads and of ranks, divides the other.
        """
        heads = self.num_kv_heads
        if heads % num_ranks and num_ranks % heads:
            raise LayoutMismatch(
                f"{heads} KV heads can be neither split nor replicated over {num_ranks} ranks"
            )
        count = max(1, heads // num_ranks)
        return msgspec.structs.replace(
            self,
            num_kv_heads=count,
            first_kv_head=rank * heads // num_ranks // count * count,
            model_kv_heads=heads,
        )

    def stage(self, stage: int, num_stages: int) -> KvLayout:
        """The layout of one pipeline stage, given that of the whole model."""
        first, end = (n * self.num_layers // num_stages for n in (stage, stage + 1))
        return msgspec.structs.replace(
            self, num_layers=end - first, first_layer=first, model_layers=self.num_layers
        )

    def parts(self, num_ranks: int, num_stages: int) -> list[KvLayout]:
        """The layouts of the ranks of all stages, stage by stage, given that of the whole model.

        Raises:
            LayoutMismatch: as `shard`; or there are more stages than layers.
        """
        if num_stages > self.num_layers:
            raise LayoutMismatch(
                f"{self.num_layers} layers cannot be split over {num_stages} stages"
            )
        stages = [self]
        if num_stages > 1:
            stages = [self.stage(stage, num_stages) for stage in range(num_stages)]
        if num_ranks == 1:
            return stages
        return [each.shard(rank, num_ranks) for each in stages for rank in range(num_ranks)]

    def check(self) -> None:
        """Check a layout that a peer has sent.

        Raises:
            LayoutMismatch: a size is not positive, or absurdly large.
        """
        sizes = (self.num_layers, self.num_kv_heads, self.head_dim, self.block_size)
        if not all(0 < size <= _MAX_DIMENSION for size in sizes):
            raise LayoutMismatch(f"not a KV layout: {self}")
        if not 0 <= self.first_kv_head < self.end_kv_head <= self.total_kv_heads <= _MAX_DIMENSION:
            raise LayoutMismatch(f"not a KV layout, by its heads: {self}")
        if not 0 <= self.first_layer < self.end_layer <= self.total_layers <= _MAX_DIMENSION:
            raise LayoutMismatch(f"not a KV layout, by its layers: {self}")
        if self.windows and (
            not len(self.windows) == self.num_layers == self.total_layers or min(self.windows) < 0
        ):
            raise LayoutMismatch(f"not a KV layout, by its windows: {self}")
        if not 0 <= self.state_bytes <= _MAX_STATE_BYTES:
            raise LayoutMismatch(f"not a KV layout, by the bytes of a state: {self}")
        if self.rounded_to and (self.dtype.is_coded or not self.rounded_to.is_coded):
            raise LayoutMismatch(f"not a KV layout, by what rows are rounded to: {self}")
        if self.block_bytes > _MAX_BLOCK_BYTES:
            raise LayoutMismatch(f"not a KV layout, {self.block_bytes} bytes a block: {self}")

    @property
    def layers(self) -> range:
        """The layers of the model that this pool has."""
        return _costs(self).layers

    @property
    def heads(self) -> range:
        """The KV heads of the model that this pool has."""
        return _costs(self).heads

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Keys and values, or latent rows, in the order in which each layer of a block has them.

        All of them have the same layers and heads.
        """
        return _costs(self).planes

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token."""
        return _costs(self).token_bytes

    @property
    def head_bytes(self) -> int:
        """KV bytes of one token in one head of one layer."""
        return _costs(self).head_bytes

    @property
    def places(self) -> tuple[Place, ...]:
        """Where the KV of each of the pool's layers is."""
        return places(self.windows or (0,) * self.num_layers)

    @property
    def num_companions(self) -> int:
        """Blocks besides the first, for the same tokens, as long as these are in all windows."""
        return _costs(self).num_companions

    @property
    def block_layers(self) -> int:
        """Layers for which a block has room: those of the pool, unless it has companions."""
        return _costs(self).block_layers

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, across all of its layers."""
        return _costs(self).layer_bytes * _costs(self).block_layers

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return _costs(self).layer_bytes

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[block_layers, num_planes, num_kv_heads, block_size, elements of a row]."""
        return (
            self.block_layers,
            len(self.planes),
            self.num_kv_heads,
            self.block_size,
            self.dtype.row_elements(self.head_dim),
        )

    @property
    def state_blocks(self) -> int:
        """Blocks of a request's state: as many as hold it, one behind the other."""
        return -(-self.state_bytes // self.block_bytes)

    def blocks_for(self, num_tokens: int) -> int:
        """See `need.blocks_for`."""
        return -(-num_tokens // self.block_size)

    def full_blocks(self, num_tokens: int) -> int:
        """See `need.full_blocks`."""
        return num_tokens // self.block_size

    def tokens_in(self, num_blocks: int) -> int:
        """See `need.tokens_in`."""
        return num_blocks * self.block_size

    def whole_blocks(self, num_blocks: int) -> int:
        """How many stretches of tokens so many blocks hold, companions included."""
        return num_blocks // (1 + self.num_companions)

    def blocks_held(self, num_tokens: int) -> int:
        """Blocks of a request of so many tokens, once windows have passed the others."""
        num_first = self.blocks_for(num_tokens)
        if not self.num_companions:
            return num_first + self.state_blocks
        first_seen = need.window_block(num_tokens, max(self.windows), self.block_size)
        return num_first + (num_first - first_seen) * self.num_companions

    @property
    def per_request(self) -> need.PerRequest:
        """What the pool holds of a request besides the KV of its tokens, and what less."""
        states = self.tokens_in(self.state_blocks)
        return need.PerRequest(self.num_companions, _costs(self).seen_tokens, states)

    def held_tokens(self, num_tokens: float, num_requests: float = 1) -> float:
        """See `need.held_tokens`."""
        return need.held_tokens(num_tokens, num_requests, self.per_request)

    def tokens_of_held(self, held_tokens: float, num_requests: float = 1) -> float:
        """See `need.tokens_of_held`."""
        return need.tokens_of_held(held_tokens, num_requests, self.per_request)

    def least_blocks(self, max_model_len: int) -> int:
        """Blocks that one request of `max_model_len` tokens needs, companions counted.

        Of a state, it has its own blocks, and those of the snapshot that it goes on from.
        """
        return self.blocks_for(max_model_len) * (1 + self.num_companions) + 2 * self.state_blocks

    def blocks_in_budget(self, budget_bytes: int, max_model_len: int) -> int:
        """How many blocks fit into a memory budget.

        Raises:
            KvBudgetTooSmall: one request of `max_model_len` tokens would not fit; with the numbers.
        """
        num_blocks = budget_bytes // self.block_bytes
        needed = self.least_blocks(max_model_len)
        if num_blocks < needed:
            raise KvBudgetTooSmall(
                f"a KV budget of {budget_bytes} bytes holds {num_blocks} blocks of "
                f"{self.block_bytes} bytes ({self.describe()}), but one request of "
                f"max_model_len {max_model_len} needs {needed} blocks = "
                f"{needed * self.block_bytes} bytes: raise the budget or lower max_model_len"
            )
        return num_blocks

    def describe(self) -> str:
        """One line for logs and errors: the KV arithmetic in full."""
        shard = (
            f" ({self.first_kv_head}..{self.end_kv_head - 1} of {self.total_kv_heads})"
            if self.num_kv_heads < self.total_kv_heads
            else ""
        )
        layers = (
            f" ({self.first_layer}..{self.end_layer - 1} of {self.total_layers})"
            if self.num_layers < self.total_layers
            else ""
        )
        kinds = "" if self.is_latent else "2 x "
        scales = f", {_SCALE_BYTES} more for a scale" if self.dtype.is_coded else ""
        return (
            f"{kinds}{self.num_layers} layers{layers} x {self.num_kv_heads} KV heads{shard} x "
            f"{self.head_dim} head_dim x {self.dtype.itemsize} bytes ({self.dtype}{scales}) = "
            f"{self.token_bytes} bytes a token, {self.block_size} tokens a block"
            + (f" of {self.block_layers} layers" if self.num_companions else "")
            + (f"; {self.state_bytes} bytes a request besides" if self.state_bytes else "")
            + (f"; rounded to {self.rounded_to}" if self.rounded_to else "")
        )

    def fingerprint(self, model_id: str, revision: str) -> str:
        """Hash that two nodes compare when they connect: it covers model, revision and layout."""
        layout = msgspec.structs.asdict(self)
        if self.model_layers is None:  # as from before pools had only some of the layers
            del layout["first_layer"], layout["model_layers"]
        if not self.is_latent:  # likewise
            del layout["is_latent"]
        if not self.windows:  # likewise
            del layout["windows"]
        if not self.state_bytes:  # likewise
            del layout["state_bytes"]
        if self.rounded_to is None:  # likewise
            del layout["rounded_to"]
        content = msgspec.json.encode((LAYOUT_VERSION, model_id, revision, layout))
        return hashlib.blake2b(content, digest_size=16).hexdigest()


class _Costs(NamedTuple):
    layers: range
    heads: range
    planes: tuple[Plane, ...]
    token_bytes: int
    head_bytes: int
    layer_bytes: int
    num_companions: int
    block_layers: int
    seen_tokens: int


@lru_cache(maxsize=256)  # every pull asks for those of the same few layouts
def _costs(layout: KvLayout) -> _Costs:
    layers = range(layout.first_layer, layout.end_layer)
    heads = range(layout.first_kv_head, layout.end_kv_head)
    row_bytes = layout.dtype.row_elements(layout.head_dim) * layout.dtype.itemsize
    names = ("latent",) if layout.is_latent else ("k", "v")
    planes = tuple(Plane(name, layers, heads, row_bytes) for name in names)
    token_bytes = sum(plane.token_bytes for plane in planes)
    head_bytes = sum(plane.row_bytes for plane in planes)
    layer_bytes = sum(plane.layer_bytes for plane in planes) * layout.block_size
    num_companions, block_layers, seen_tokens = 0, layout.num_layers, 0
    if layout.windows:
        own = places(layout.windows)
        num_companions = max(place.block for place in own)
        block_layers = 1 + max(place.layer for place in own)
        seen_tokens = need.window_tokens(max(layout.windows), layout.block_size)
    return _Costs(
        layers,
        heads,
        planes,
        token_bytes,
        head_bytes,
        layer_bytes,
        num_companions,
        block_layers,
        seen_tokens,
    )
