"""Which failed steps mean that the node is sick, and not just a request of the step.

A request that makes its steps fail is dropped with them. It is sent again once or twice at most, so
a row of failures that no step interrupts is the machine's. Some errors need no second one: CUDA
answers every call after them with the same error, until the process ends.
"""

from __future__ import annotations

from typing import Final

from pdserve.protocol import Sickness
from pdserve.shared.errors import NodeSick, RequestsFailed, UnusableLogits

FAILURES_IN_A_ROW: Final = 5

# What CUDA, torch and Triton write of errors after which a process's context is lost. Others, such
# as "out of memory" or "invalid argument", leave it as it was.
_LOST_CONTEXT: Final = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out",
    "misaligned address",
    "illegal instruction",
    "illegal address",
    "invalid program counter",
    "hardware stack error",
    "uncorrectable",  # ECC or NVLINK
    "context is destroyed",
    "device is busy or unavailable",
    "device unavailable",
    "unknown error",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a step needed more memory than there was; a smaller one may not."""
    # torch's own class is not imported: simulations drive this loop without torch.
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def is_device_fault(error: BaseException) -> bool:
    """Whether the error, or one that it was raised from, says that the GPU's context is lost."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        if ("cuda" in text or "nvlink" in text) and any(lost in text for lost in _LOST_CONTEXT):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _is_by_requests(error: Exception) -> bool:
    """Whether requests have caused it that are known. Logits that are no distribution may be the
    machine's: those of a request alone stop with it.
    """
    is_named = isinstance(error, RequestsFailed) and bool(error.request_ids)
    return is_named and not isinstance(error, UnusableLogits)


class FailedSteps:
    """Counts steps that failed in a row, through no request's fault that is known."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def succeeded(self) -> None:
        """A step was computed."""
        self._in_a_row = 0

    def failed(self, error: Exception) -> None:
        """A step was not computed.

        Raises:
            NodeSick: no further one will be, either.
        """
        if _is_by_requests(error):
            return
        self._in_a_row += 1
        told = f"{type(error).__name__}: {error}"
        if isinstance(error, NodeSick):
            raise error
        if is_device_fault(error):
            raise NodeSick(f"{Sickness.DEVICE_FAULT}: {told}") from error
        if self._in_a_row >= FAILURES_IN_A_ROW:
            raise NodeSick(
                f"{Sickness.STEPS_FAIL}: {self._in_a_row} in a row, the last one with {told}"
            ) from error
