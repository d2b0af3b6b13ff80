"""Exit codes of `pdserve`."""

from __future__ import annotations

from typing import Final

from pdserve.shared.errors import (
    ClusterError,
    ConfigError,
    KvBudgetTooSmall,
    ModelError,
    PdserveError,
)
from pdserve.shared.process.may_pass import NotNow
from pdserve.shared.process.signals import FORCED as FORCED

OK = 0
FAILED = 1
USERS_FAULT = 2
SICK = 3

MEANING: Final = {
    OK: "as it was asked to",
    FAILED: "failed",
    USERS_FAULT: "wrong usage or config",
    SICK: "a node that was sick",
    FORCED: "interrupted",
}


class StartFailed(ClusterError):
    """A process of the cluster ended, or a deadline passed, before the cluster was ready."""

    code = "start_failed"

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_code_of(error: PdserveError) -> int:
    """The exit code of a command that failed with `error`; USERS_FAULT: as it will each time."""
    if isinstance(error, StartFailed):
        return error.exit_code
    if isinstance(error, NotNow):
        return FAILED
    if isinstance(error, ConfigError | ModelError | KvBudgetTooSmall):
        return USERS_FAULT
    return FAILED
