"""Which nodes can pull from each other: checked once, when a session is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.memory import KvPool
from kv_transfer.spans.shards import check_compatible
from pdserve.errors import LayoutMismatch
from pdserve.kv import KvLayout


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """Which model's KV a node holds, and how it is laid out."""

    model_id: str
    revision: str
    layout: KvLayout  # of all parts of the pool together
    num_stages: int = 1  # among which the parts of a pool in several are divided

    @property
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
