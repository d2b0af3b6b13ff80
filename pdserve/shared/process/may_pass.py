"""Which failures of the system may be over when a process is started again.

A full disk, a port that the former process still has, a hub that is not reached: to give up for
good would be wrong, as it would be to try wrong settings for ever. Exit codes tell the two apart.
"""

from __future__ import annotations

import errno
import sqlite3
from typing import Final

from pdserve.shared.errors import ConfigError

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM})
_PASSES: Final = _NO_ROOM | {
    errno.EADDRINUSE,
    errno.EADDRNOTAVAIL,
    errno.EAGAIN,
    errno.EBUSY,
    errno.EMFILE,
    errno.ENFILE,
    errno.EROFS,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
_SQLITE_NO_ROOM: Final = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM}
)
_SQLITE_PASSES: Final = _SQLITE_NO_ROOM | {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class NotNow(ConfigError):
    """What the settings name cannot be had now, but may be later: room, a port, a download."""

    code = "not_now"


def has_no_room(error: BaseException) -> bool:
    """Whether a disk, or memory, does not take what is written to it: as if it were full."""
    return _is_one_of(error, _NO_ROOM, _SQLITE_NO_ROOM)


def config_error(message: str, cause: BaseException) -> ConfigError:
    """What a process says that cannot start because of `cause`."""
    may_pass = _is_one_of(cause, _PASSES, _SQLITE_PASSES)
    return NotNow(message) if may_pass else ConfigError(message)


def _is_one_of(error: BaseException, numbers: frozenset[int], of_sqlite: frozenset[int]) -> bool:
    if isinstance(error, sqlite3.Error):
        code: int = getattr(error, "sqlite_errorcode", 0)  # some are the module's own
        return code & 0xFF in of_sqlite  # the rest says more of the same
    return isinstance(error, OSError) and error.errno in numbers
