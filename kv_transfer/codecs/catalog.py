"""Which codecs this process has for KV of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from kv_transfer.codecs.codec import Codec
from kv_transfer.codecs.lossless import lossless_codecs
from kv_transfer.codecs.rows import row_codecs
from pdserve.kv import KvLayout


@lru_cache(maxsize=64)
def codecs_for(layout: KvLayout) -> Mapping[str, Codec]:
    """By name, best first; where rows have codes, none that would take more bytes than these."""
    return MappingProxyType(row_codecs(layout) or lossless_codecs(layout.dtype.itemsize))
