"""Where prompt prefixes come from, besides a node's own pool."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pdserve.settings.struct import ConfigStruct, Size

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
