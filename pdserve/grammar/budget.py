"""What the masks of an answer's grammar may take of a node, in seconds of CPU time."""

from __future__ import annotations

from typing import Final

MASK_CPU_S: Final = 0.2  # one mask; usually it takes microseconds, at worst 20 ms
STEP_CPU_S: Final = 0.001  # those of a payer in a step that others are in
ALONE_CPU_S: Final = 0.008  # and in one that nobody else is in
ANSWER_CPU_S: Final = 10.0  # those of an answer that were computed beside steps
