"""Names of threads as the system shows them, in `top -H` and debuggers."""

from __future__ import annotations

import ctypes
from typing import Final

ENGINE_THREAD: Final = "engine"  # of a node: it computes the steps
KERNEL_THREAD: Final = "pdserve-kernel"  # its workers, as `csrc/threads` names them
_PR_SET_NAME = 15


def name_this_thread(name: str) -> None:
    """Name it; threads that it starts have the same name at first. At most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
