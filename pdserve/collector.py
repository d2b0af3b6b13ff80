"""Python's garbage collector in a process that serves.

What requests leave is freed with its last reference: they make no cycles, which a test counts. So
the collector has next to nothing to do, but while it looks for it nobody gets a token, and the time
that takes grows with all that lives. Most of that was loaded at the start and stays: 30 ms in a
coordinator, 100 ms in a node with torch. It is set aside once. The collector stays on for the rest,
with the thresholds it comes with, so that a cycle that is made after all costs memory for a while
and not for ever: a full pass then walks only what has come since.
"""

from __future__ import annotations

import gc


def keep_what_is_loaded() -> None:
    """Have the collector never look at what is there now; to be called once, before serving."""
    gc.collect()
    gc.freeze()
