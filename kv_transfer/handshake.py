"""Which nodes can pull from each other: checked once, when a session is opened.

Access tokens admit the pullers of open sessions to an exporter's transports. Sessions are for nodes
that a coordinator has introduced (`pdserve/shared/introduction.py`), and transports are for nodes
with a session. A token is valid as long as its session.

What a token permits depends on the transport. With a two-sided one (tcp, nccl), the exporter
verifies each ticket and its expiry before it sends a byte. With a one-sided one (shm, cuda_ipc,
ucx), the puller can read the whole pool from then on until it unmaps it, even after its session has
ended; the exporter never sees the tickets, and only the generations tell whether a read is valid.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kv_transfer.memory import KvPool
from kv_transfer.spans.box import check_compatible
from pdserve.kv import KvLayout
from pdserve.shared.errors import AccessDenied, LayoutMismatch

ACCESS_BYTES = 32


class AccessTokens:
    """The tokens of one exporter's open sessions."""

    def __init__(self) -> None:
        self._valid: set[bytes] = set()

    def grant(self) -> bytes:
        """Create a token. A secret: never logged or shown."""
        token = secrets.token_bytes(ACCESS_BYTES)
        self._valid.add(token)
        return token

    def add(self, token: bytes) -> None:
        """Let a token be valid that the node has created, on another host."""
        self._valid.add(token)

    def revoke(self, token: bytes) -> None:
        """Invalidate a token. Idempotent."""
        self._valid.discard(token)

    def __contains__(self, token: bytes) -> bool:
        """Whether a token belongs to an open session."""
        return token in self._valid

    def check(self, token: bytes) -> None:
        """Check that a token belongs to an open session.

        Raises:
            AccessDenied: it does not.
        """
        # The timing of a hash lookup does not reveal how much of a guess is right: hashes of
        # `bytes` are keyed per process.
        if token not in self:
            raise AccessDenied("this connection belongs to no open session with the exporter")


@dataclass(frozen=True)
class KvIdentity:
    """Which model's KV a node holds, and how it is laid out."""

    model_id: str
    revision: str
    layout: KvLayout  # of all parts of the pool together
    num_stages: int = 1  # among which the parts of a pool in several are divided
    windows: tuple[int | None, ...] = ()  # of the model's layers, in tokens; (): none has one

    @cached_property  # each ticket has it
    def fingerprint(self) -> str:
        """A hash of model, revision and layout, for the peer to compare."""
        return self.layout.fingerprint(self.model_id, self.revision)

    def check_pools(self, pools: Sequence[KvPool]) -> list[KvLayout]:
        """Return the layout of each part of our own pool, of which there usually is one.

        Raises:
            ValueError: its blocks are of another size.
        """
        layouts = [self.layout]
        if len(pools) > 1:
            layouts = self.layout.parts(len(pools) // self.num_stages, self.num_stages)
        for pool, layout in zip(pools, layouts, strict=True):
            if pool.block_bytes != layout.block_bytes:
                raise ValueError(
                    f"the pool has blocks of {pool.block_bytes} bytes, the layout of "
                    f"{layout.block_bytes}"
                )
        return layouts

    def check_peer(self, peer_id: str, fingerprint: str, layout: KvLayout) -> None:
        """Check that the peer has the same model, and a layout that can be converted to ours.

        A fingerprint covers model and layout together. So the peer's fingerprint must be that of
        *our* model in the *peer's* layout; a mere difference of layouts does not matter.

        Raises:
            LayoutMismatch: with both sides' values.
        """
        layout.check()
        check_compatible(layout, self.layout)
        expected = layout.fingerprint(self.model_id, self.revision)
        if fingerprint != expected:
            raise LayoutMismatch(
                f"{peer_id!r} holds KV of fingerprint {fingerprint}; {self.model_id!r} revision "
                f"{self.revision!r} has {expected} in its layout ({layout.describe()}), "
                f"and {self.fingerprint} in ours ({self.layout.describe()})"
            )
