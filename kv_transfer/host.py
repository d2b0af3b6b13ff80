"""Identifies processes that can share memory with each other."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Abstract socket names belong to a network namespace, user ids to a user namespace.
_NAMESPACES = (Path("/proc/self/ns/net"), Path("/proc/self/ns/user"))


def host_id() -> str:
    """Equal in two processes if and only if they can pass file descriptors to each other.

    That is: same boot of the same kernel, same user, same network and user namespace. If this
    cannot be determined, the id is unique, and TCP will be used. (Clones of a virtual machine may
    have equal ids; then obtaining the descriptor fails, and TCP is used.)
    """
    try:
        boot_id = _BOOT_ID.read_text().strip()
        namespaces = [str(path.stat().st_ino) for path in _NAMESPACES]
    except OSError:
        return f"unknown-{secrets.token_hex(16)}"
    return "-".join([boot_id, str(os.geteuid()), *namespaces])
