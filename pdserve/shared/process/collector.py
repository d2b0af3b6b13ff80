"""Python's garbage collector, and the C library's free memory, in a serving process.

What requests leave is freed with its last reference: they make no cycles, which a test counts. So
the collector has next to nothing to do, but while it looks for it nobody gets a token, and the time
that takes grows with all that lives. Most of that was loaded at the start and stays: 30 ms in a
coordinator, 100 ms in a node with torch. It is set aside once.

The collector stays on for the rest, so that a cycle that is made after all costs memory for a while
and not for ever. By default every tenth pass over the youngest objects goes over everything that
requests under way have made, too: three times a second in a busy coordinator, for up to 9 ms, and a
full pass took 50 ms. Those passes are made far more rarely; what is dead by then is a few MB.

While a process starts there are none at all: what modules and vocabularies make is there to stay,
and to look at it again and again took a tenth of the time.

What loading has freed stays in the C library's arenas: 170 MB after a vocabulary of 262,144 tokens.
It goes back to the system once, too, and again after a tokenizer that is loaded later.
"""

from __future__ import annotations

import ctypes
import gc

_YOUNG_PASSES = 200  # over the youngest objects, for one over those that have seen a pass


def pause_collector() -> None:
    """Collect nothing until `freeze_loaded_objects`: to be called when a start begins."""
    gc.disable()


def freeze_loaded_objects() -> None:
    """Have the collector never look at what is there now, and rarely at what is under way.

    To be called once, before serving.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    youngest, _, oldest = gc.get_threshold()
    gc.set_threshold(youngest, _YOUNG_PASSES, oldest)
    return_free_memory()


def return_free_memory() -> None:
    """Give what the C library holds, and nobody uses, back to the system."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)
