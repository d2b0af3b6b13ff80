"""Memory that processes share, behind a file descriptor. Nobody can cut it while others use it."""

from __future__ import annotations

import fcntl
import os

import numpy as np
from numpy.typing import NDArray

from pdserve import _native

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Who maps it can rely on its size: touching a page beyond the end would kill the process."""


def sealed_memory(name: str, size: int, seals: int = SIZE_SEALS) -> tuple[int, NDArray[np.uint8]]:
    """New memory that others can map: (descriptor, mapping).

    Raises:
        OSError: there is no descriptor or no address space left.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        mapping = _native.map_shared(fd, size, writable=True)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(fd)
        raise
    return fd, mapping
