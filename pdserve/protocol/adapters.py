"""Adapters of the model: which ones a node has, and the orders to load them.

An adapter is known by its digest, of its tensors and its config, so the same files are the same
adapter under any name and on any node. The empty digest is the model itself.
"""

from __future__ import annotations

import re
from typing import Final

from pdserve.protocol.message import Message
from pdserve.shared.errors import MalformedMessage

_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


class LoadAdapter(Message, frozen=True):
    """Load the adapter in a folder of the node's, and keep it for this coordinator.

    Answered with `AdapterLoaded`.
    """

    order_id: str  # unique for the coordinator
    path: str
    digest: str = ""  # that it must have; empty: that of whatever is there


class AdapterLoaded(Message, frozen=True):
    """A `LoadAdapter` is over: the node has the adapter, or says why not."""

    order_id: str
    digest: str = ""
    num_bytes: int = 0
    invocation: list[int] = []  # tokens of a prompt from which on it computes; []: it computes all
    code: str = ""  # of the error; empty: it is loaded
    message: str = ""


class UnloadAdapter(Message, frozen=True):
    """This coordinator sends no more legs with an adapter.

    The node keeps it while a leg has it, or another coordinator wants it. It is not answered.
    """

    digest: str


class AdapterReport(Message, frozen=True):
    """All adapters that a node has. Sent after a hello, and after each change.

    Legs are sent only to nodes that have said so.
    """

    digests: list[str] = []
    most: int = 0  # that it keeps at a time; beyond, those leave whose last leg is the longest ago

    def check(self) -> None:
        """Check a report that a node has sent. Raises MalformedMessage: these are no digests."""
        if not all(_DIGEST.fullmatch(digest) for digest in self.digests):
            raise MalformedMessage(f"AdapterReport: a digest has 32 hex digits: {self.digests[:4]}")
