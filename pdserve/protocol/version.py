"""Which builds work together: those whose protocols are at most one apart.

So a cluster is upgraded process by process. PROTOCOL is raised by a change that a process would do
wrong with if it did not know it; a field or kind of message that it may ignore raises nothing. What
there is keeps its numbers and types for ever (`tests/architecture/wire_fields.txt`).

    1   it is told
    2   nodes take streams over while they run, and pull from pools that are in several parts
    3   kinds of messages that a process does not know are left out, not refused
"""

from __future__ import annotations

from typing import Final

from pdserve.shared.errors import ConfigError

PROTOCOL: Final = 3


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
