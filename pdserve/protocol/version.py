"""Which builds work together: those whose protocols are at most one apart.

So a cluster is upgraded process by process. PROTOCOL is raised by a change that a process would do
wrong with if it did not know it; a field that it may ignore raises nothing. Fields keep their
numbers and types for ever (`tests/architecture/wire_fields.txt`).
"""

from __future__ import annotations

from typing import Final

from pdserve.shared.errors import ConfigError

PROTOCOL: Final = 2  # 0: builds from before it was told
TAKES_OVER: Final = 2  # the first one in which a node takes a stream over while it runs
READS_PARTS: Final = 2  # and in which one pulls from a pool that is in several parts


def check_protocol(theirs: int, who: str) -> None:
    """Check that we understand a process.

    Raises:
        ConfigError: its protocol is too far from ours; says who has to be upgraded.
    """
    if abs(theirs - PROTOCOL) > 1:
        older = who if theirs < PROTOCOL else "this process"
        raise ConfigError(
            f"{who} speaks protocol {theirs}, this process {PROTOCOL}, and they may be one apart: "
            f"upgrade {older}, through a version in between if there are streams to keep"
        )
