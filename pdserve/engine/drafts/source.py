"""Where drafts come from: the interface of their sources. Nothing else knows which there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdserve.engine.request import Request


class Drafter(Protocol):
    """One source's drafts of one stream.

    It sees by the request's output what came of its drafts.
    """

    def propose(self, request: Request, most: int) -> tuple[Sequence[int], int]:
        """Return at most so many tokens that may come next, and how sure they are.

        Called on the event loop before each step of decodes of this stream, while no step runs. The
        larger the second, the surer: the number of tokens that speak for them (`Shares`).
        """


class Source(Protocol):
    """A kind of drafts, of all streams of a node."""

    @property
    def name(self) -> str:
        """What metrics call it."""

    def drafter(self, request: Request) -> Drafter | None:
        """Return what drafts a stream that has begun to decode here; None: nothing does."""

    def ended(self, request: Request) -> None:
        """Note that a stream that it drafts for is over here: finished, given up, or gone on."""
