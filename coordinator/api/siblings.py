"""Several answers to one prompt: the prompt is computed for the first, the others follow.

They are started when the first one's token 1 is there. By then its KV is cached where it was
computed, so that a follower's prefill is the rest of a block, and its KV goes wherever it is
decoded.
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.generation import Generation, Listener, Route
from pdserve.errors import PdserveError, RequestCancelled


class Follower:
    """A Generation that begins when it is let."""

    def __init__(self, start: Callable[[], Generation]) -> None:
        self._start = start
        self._listener: Listener | None = None
        self._started: Generation | None = None
        self._is_over = False

    @property
    def route(self) -> Route:
        """See Generation.route."""
        return Route(None, None) if self._started is None else self._started.route

    def begin(self) -> None:
        """The prompt has been computed; it has a listener by now. Harmless when repeated."""
        assert self._listener is not None
        if self._started is not None or self._is_over:
            return
        try:
            self._started = self._start()
        except PdserveError as error:
            self._end(error)
        else:
            self._started.listen(self._listener)

    def listen(self, listener: Listener) -> None:
        """See Generation.listen; an error of starting it is told as well."""
        self._listener = listener

    def cancel(self, reason: str) -> None:
        """See Generation.cancel."""
        if self._started is not None:
            self._started.cancel(reason)
        elif not self._is_over:
            self._end(RequestCancelled(reason))

    def _end(self, error: PdserveError) -> None:
        self._is_over = True
        if self._listener is not None:
            self._listener(error)
