"""How many files, connections included, this process may have open."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress


def raise_file_limit(num_files: int) -> int:
    """Let this process open so many files, as far as its hard limit allows; returns the limit.

    The soft limit that it is started with is often 1024, since `select` cannot count further.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files if hard_limit == resource.RLIM_INFINITY else min(num_files, hard_limit)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < wanted:
        with suppress(OSError, ValueError):  # more than the kernel allows any process
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard_limit))
    return file_limit()


def file_limit() -> int:
    """The number of files that this process may have open now."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft_limit == resource.RLIM_INFINITY else soft_limit
