"""What a store of responses may have besides its memory; in itself, nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from coordinator.stateful.storage.stored import EventLog, Stored, StoredConversation, StoredResponse

Key = tuple[str, str]  # (owner, id)
Change = Callable[[StoredConversation], None]
Known = Mapping[Key, Stored | None]  # None: there is no such entry


class Backing:
    """Memory alone: what a file (`store_file`) or tables for several coordinators (`shared`) do.

    Methods that take an entry return at once; what they were told is written soon after.
    """

    is_durable = False  # a later coordinator finds what is stored
    outlives_memory = False  # what memory has no room for is stored all the same

    def load(self) -> Iterable[Stored]:
        """Yield what memory is to begin with, the least recently written first."""
        return ()

    def begin(self, taken: Callable[[Stored], None], dropped: Callable[[Stored], None]) -> None:
        """Begin to follow other coordinators, on the running loop.

        `taken` is called with an entry that memory has to have as it is now, `dropped` with one
        that is not stored any more.
        """

    def put(self, stored: Stored, change: Change | None = None) -> None:
        """Have a new or a changed entry written; `change` is what was done to a conversation."""

    def logged(self, stored: StoredResponse) -> None:
        """Have the new events of a response written, for readers at other coordinators."""

    def delete(self, stored: Stored) -> None:
        """Have an entry deleted."""

    def evict(self, stored: Stored) -> None:
        """Have an entry deleted for which memory has no room."""
        self.delete(stored)

    async def newer(self, known: Known) -> Known:
        """Return those entries that are not as they are known here. Raises StoreUnavailable."""
        return {}

    async def log_of(self, stored: StoredResponse) -> EventLog | None:
        """Return the events of a response that another coordinator makes or has made.

        None: none were kept. Raises StoreUnavailable.
        """
        return stored.log

    async def stop(self, stored: StoredResponse, timeout_s: float) -> None:
        """Have another coordinator stop making a response; waits until it has, but no longer.

        Raises StoreUnavailable.
        """

    async def saved(self) -> None:
        """Wait until all that was told so far is written. Raises StoreUnavailable."""

    async def close(self) -> None:
        """Write what is still to be written, and let go."""
