"""What the first host of a node says of each step, and what a later one answers."""

from __future__ import annotations

import msgspec

from pdserve.shared.errors import PeerLost


class DeviceHostStep(msgspec.Struct, frozen=True):
    """A step: its memory follows, num_bytes."""

    num_bytes: int
    num_bumps: int  # messages about generations that must have come before anything is written


class HostResult(msgspec.Struct, frozen=True):
    """The step has been computed: its states follow, [num_states, hidden_size] float32.

    They do where the first rank of the last stage is. Before the first step: it has no ranks, or
    refuses.
    """

    num_states: int = 0
    error: str = ""  # it cannot go on: says why

    def check(self) -> None:
        """Raises PeerLost: it cannot go on."""
        if self.error:
            raise PeerLost(self.error)
