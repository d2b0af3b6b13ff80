"""When is it too late to begin a prompt, or to go on with it? One rule of node policies and router.

Under overload, nodes with `edf-slack` (`pdserve/engine/prompts/order.py`) compute prompts that can
no longer be in time after all others of the same payer, and the router does not let a new prompt
wait for them (`coordinator/routing/loads/prefill.py`).
"""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

Seconds = TypeVar("Seconds", float, npt.NDArray[np.float64])

NEEDED: Final = 1.5  # factor on the time that a prompt takes alone: steps may be shared


def begin_by_s(due_s: float, alone_s: Seconds) -> Seconds:
    """Return the latest time to begin a prompt whose token 1 is due then.

    `alone_s` is the predicted time of the prompt by itself. Times are on one clock, in seconds.
    """
    return due_s - NEEDED * alone_s


def go_on_by_s(due_s: float, left_s: Seconds) -> Seconds:
    """Return the latest time to go on with a prompt that has begun, and takes `left_s` more."""
    return due_s - left_s


def has_late_last(prefill_policy: str) -> bool:
    """Return whether nodes with this policy do so. Of rules in other packages nothing is known."""
    return prefill_policy == "edf-slack"
