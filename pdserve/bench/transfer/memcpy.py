"""The yardstick: one thread copies as many blocks between two pools of this process.

Uses one numpy assignment per block, which is one C memcpy; `ctypes.memmove` was slower at 64 KiB
(its calls cost more) and equal above. The pools are of the exported kind, so page sizes are the
same as in the transfer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kv_transfer.memory import ExportedPool


def time_memcpy(
    source: ExportedPool,
    source_ids: Sequence[int],
    destination: ExportedPool,
    destination_ids: Sequence[int],
) -> float:
    """Copy block by block; return the seconds."""
    into, out_of = destination.data, source.data
    started_s = time.perf_counter()
    for destination_id, source_id in zip(destination_ids, source_ids, strict=True):
        into[destination_id] = out_of[source_id]
    return time.perf_counter() - started_s
