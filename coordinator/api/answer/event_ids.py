"""Ids of the events of a keyed stream, by which its client can go on after a broken connection.

An id says how many events of each choice there were up to this one: `7`, or `7-5` with two choices,
as the choices' events may come in another order the next time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.errors import InvalidRequest


class EventIds:
    """Numbers the events of one stream, and leaves out those that the client has.

    `seen` says how many of each choice it has; a single 0, or None: none. Raises InvalidRequest.
    """

    def __init__(self, num_choices: int, seen: Sequence[int] | None) -> None:
        if seen is None or list(seen) == [0]:
            seen = [0] * num_choices
        if len(seen) != num_choices:
            raise InvalidRequest(
                f"'Last-Event-ID' has {len(seen)} parts, but the ids of this stream's events have "
                f"{num_choices}: one for each choice",
                "Last-Event-ID",
            )
        self._seen = seen
        self._made = [0] * num_choices

    def unseen(self, choice: int, events: Sequence[bytes]) -> Iterator[bytes]:
        """Yield those of the next events of a choice that the client does not have, with ids."""
        for event in events:
            self._made[choice] += 1
            if self._made[choice] > self._seen[choice]:
                # What was left out of other choices is not made yet, but the client has it.
                counts = map(max, self._made, self._seen)
                yield f"id: {'-'.join(map(str, counts))}\n".encode() + event
