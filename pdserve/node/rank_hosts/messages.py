"""What the hosts of a node tell each other. Arrays follow as each struct says."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.engine.ranks.hosts import HostShare
from pdserve.engine.steps.worst import LargestStep
from pdserve.kv import KvLayout
from pdserve.node.device_hosts.messages import HostResult
from pdserve.settings.config import AttentionName
from pdserve.shared.errors import PeerLost

SECRET_BYTES: Final = 32


class DevicesOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a later host is to load, if each rank has a device of its own."""

    kind: str  # of these devices: "cuda"
    attention: AttentionName
    has_graphs: bool
    worst_step: LargestStep
    store: str  # host:port where the ranks meet
    advertised: str  # where pullers reach the later host
    # What the node shows on its connection for KV, SECRET_BYTES; empty: no KV moves.
    secret: bytes


class HostOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The first message: what a later host is to load."""

    protocol: int  # `pdserve.protocol.version.PROTOCOL`
    token: str  # join token; empty: none is in use
    model_id: str
    revision: str
    part: HostShare
    layout: KvLayout  # of the whole model
    num_blocks: int
    quantization: str  # as the setting
    activations: str = ""  # dtype; empty: that of the layout
    kernels: str  # digest of the build's arithmetic, on CPUs
    devices: DevicesOrder | None = None  # None: it computes on CPUs
    # On CPUs: what the node shows on its connection for adapters, SECRET_BYTES.
    secret: bytes = b""

    @property
    def shown(self) -> bytes:
        """What the node shows on its second connection; empty: it opens none."""
        return self.secret if self.devices is None else self.devices.secret


class HostAnswer(msgspec.Struct, frozen=True):
    """What a later host says when it has loaded, and after each step.

    After a step, and without an error: the KV of its rows, [num_tokens, num_layers, 2, heads, row],
    of the layers that this host has; logits, [num_sampled, vocab_size] float32; states,
    [num_states, hidden_size] float32; and, as these, taps of its layers, [num_sampled, num_taps,
    hidden_size].
    """

    error: str = ""  # it cannot go on: says why

    def check(self) -> None:
        """Raises PeerLost: it cannot go on."""
        if self.error:
            raise PeerLost(self.error)


def failure(order: HostOrder, why: str) -> HostAnswer | HostResult:
    """What a later host says that cannot go on with what it was asked to."""
    return HostAnswer(why) if order.devices is None else HostResult(error=why)


class HostStep(msgspec.Struct, frozen=True):
    """A step: its memory, num_bytes; numbers of blocks, int64, and these blocks, of the layers that
    the later host has; and the rows of the residual stream, part by part.
    """

    num_bytes: int
    num_blocks: int


class AdapterOrder(msgspec.Struct, frozen=True):
    """An adapter to take, whose bytes follow, `num_bytes`; or with none, one to drop."""

    number: int  # which the answer has
    digest: str
    num_bytes: int = 0
    checksum: bytes = b""  # BLAKE2b of these bytes, 32 bytes


class AdapterAnswer(msgspec.Struct, frozen=True):
    """What a later host says once all of its ranks, and the hosts behind it, have an adapter."""

    number: int
    error: str = ""  # none of them has: says why


class CarrierOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a carrier is told when it starts; descriptors are inherited."""

    rank: int
    stages: tuple[int, ...]  # of this host
    parent: int  # process id of this host's rank 0
    memory_fd: int
    pool_fd: int
    adapters_fd: int  # the socket through which rank 0 hands it adapters
    num_blocks: int
    layout: KvLayout  # of this host's pool
    first_layer: int  # in it, that the next host has
    first_layer_of_model: int  # the same, in the model
    hidden_size: int
    vocab_size: int
    tls_dir: str  # empty: the connection is in clear
    to_next: HostOrder
    address: str  # of the next host
