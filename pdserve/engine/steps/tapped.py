"""What a head goes on from: rows of the model itself, of one request. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.protocol import HeadRow
from pdserve.shared.errors import MalformedMessage


@dataclass(frozen=True, slots=True)
class Tapped:
    """Consecutive rows of a request, of its last step."""

    head: str
    first: int  # position of the first one's token
    rows: npt.NDArray[np.float32]  # [num_rows, width]

    @classmethod
    def of(cls, sent: HeadRow, position: int) -> Tapped:
        """What another node has sent of a request, of the token at this position.

        Raises:
            MalformedMessage: it is no row of float32.
        """
        if not sent.row or len(sent.row) % 4:
            raise MalformedMessage(f"HeadRow: {len(sent.row)} bytes are no row of float32")
        return cls(sent.head, position, np.frombuffer(sent.row, np.float32).copy()[None])

    def at(self, position: int) -> HeadRow | None:
        """Return what to send of the token at this position; None: it has no row."""
        if not self.first <= position < self.first + len(self.rows):
            return None
        return HeadRow(head=self.head, row=self.rows[position - self.first].tobytes())
