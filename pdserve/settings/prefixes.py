"""Where prompt prefixes come from, besides a node's own pool."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pdserve.settings.struct import ConfigStruct, Size
from pdserve.settings.values import parse_bytes

PrefixPull = Literal["auto", "always", "never"]


class PrefixConfig(ConfigStruct, frozen=True):
    """Sources of prompt prefixes besides a node's own pool."""

    prefix_pull: Annotated[
        PrefixPull,
        Meta(description="fetch prefixes from other nodes; auto: if faster than computing"),
    ] = "auto"
    tier_memory: Annotated[
        Size, Meta(description='cache for evicted prefixes, as "8GiB"; 0: none; pinned on GPUs')
    ] = "0"
    tier_dir: Annotated[
        str,
        Meta(description="directory of its file; empty: the system's temporary one; not on GPUs"),
    ] = ""
    kv_store: Annotated[
        str,
        Meta(description="folder, s3:// or gs:// where prefixes outlive nodes; empty: none"),
    ] = ""
    kv_store_size: Annotated[
        Size, Meta(description="most in it; 0: half of what it could have there")
    ] = "0"
    kv_store_quota: Annotated[Size, Meta(description="most of a tenant in it; 0: a fair share")] = (
        "0"
    )

    def check_used(self, *, prefix_cache: bool) -> None:
        """Raise ValueError if prefixes are to be kept that nobody evicts."""
        is_kept = self.kv_store or parse_bytes(self.tier_memory) > 0
        if is_kept and not prefix_cache:
            raise ValueError(
                "tier_memory and kv_store are for evicted prefixes, and without prefix_cache there "
                "are none: leave one of the two options out"
            )
