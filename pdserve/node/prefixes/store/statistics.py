"""What a node has had to do with the prefix store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StoreStatistics:
    """Counters of blocks, unless it says otherwise."""

    read: int = 0
    written: int = 0
    missing: int = 0  # removed by somebody since the last survey
    corrupt: int = 0  # other bytes than were written, or under another name
    missed: int = 0  # left the tier before they were written
    declined: int = 0  # not written: they are computed sooner than read
    evicted: int = 0  # by this node
    slow: int = 0  # prompts that waited in vain
    failed: int = 0  # reads, batches of writes, and surveys
    bytes: int = 0  # both ways
