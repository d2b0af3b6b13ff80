"""Which processes share a kernel, and may share its memory with each other."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Abstract socket names are per network namespace, user ids per user namespace.
_NAMESPACES = (Path("/proc/self/ns/net"), Path("/proc/self/ns/user"))


def host_id() -> str:
    """Equal in two processes exactly when one can hand the other a file descriptor.

    That is: same boot of the same kernel, same user, same network and user namespace. A process
    that cannot find out gets an id of its own, and talks TCP. (Clones of one virtual machine may
    share an id; then obtaining the descriptor fails, and TCP is taken.)
    """
    try:
        boot_id = _BOOT_ID.read_text().strip()
        namespaces = [str(path.stat().st_ino) for path in _NAMESPACES]
    except OSError:
        return f"unknown-{secrets.token_hex(16)}"
    return "-".join([boot_id, str(os.geteuid()), *namespaces])
