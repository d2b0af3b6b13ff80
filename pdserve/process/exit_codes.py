"""Exit codes of `pdserve`.

0 success, 1 failure, 2 wrong usage or config, 3 a node that was sick, 130 interrupted.
"""

from __future__ import annotations

from pdserve.errors import ClusterError, ConfigError, KvBudgetTooSmall, ModelError, PdserveError
from pdserve.process.signals import FORCED as FORCED

OK = 0
FAILED = 1
USERS_FAULT = 2
SICK = 3


class StartFailed(ClusterError):
    """A process of the cluster ended, or a deadline passed, before the cluster was ready."""

    code = "start_failed"

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_code_of(error: PdserveError) -> int:
    """The exit code of a command that failed with `error`."""
    if isinstance(error, StartFailed):
        return error.exit_code
    if isinstance(error, ConfigError | ModelError | KvBudgetTooSmall):
        return USERS_FAULT
    return FAILED
