"""Shows a request's events to its listener. Token 1 may be held back for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.generation import Listener
from pdserve.protocol import TokenEvent


@dataclass(slots=True)
class _Hold:
    """Token 1 is not to be shown yet."""

    timer: asyncio.TimerHandle
    on_shown: Callable[[], None]
    token_one: TokenEvent | None = None  # None: it has not arrived yet


class Showing:
    """Passes events on in order; those before there is a listener are kept for it."""

    def __init__(self) -> None:
        self._unheard: list[TokenEvent | Exception] = []  # events before there was a listener
        self._listener: Listener = self._unheard.append
        self._hold: _Hold | None = None

    def listen(self, listener: Listener) -> None:
        """Pass all events to `listener`: those so far at once, later ones as they arrive."""
        self._listener = listener
        for event in self._unheard:
            listener(event)
        self._unheard.clear()

    def hold(self, at_most_s: float, on_shown: Callable[[], None]) -> None:
        """Hold back token 1, the next event, until another event or for `at_most_s`.

        `on_shown` is called when token 1 is passed to the listener.
        """
        timer = asyncio.get_running_loop().call_later(at_most_s, self._end_hold)
        self._hold = _Hold(timer, on_shown)

    def show(self, event: TokenEvent | Exception) -> None:
        """Pass an event to the listener, unless it is a token 1 that is held back."""
        hold = self._hold
        if hold is not None:
            if hold.token_one is None and isinstance(event, TokenEvent):
                hold.token_one = event
                return
            self._end_hold()
        self._listener(event)

    def _end_hold(self) -> None:
        """Stop holding back, and show token 1 if it has arrived."""
        hold, self._hold = self._hold, None
        if hold is None:
            return
        hold.timer.cancel()
        if hold.token_one is not None:
            hold.on_shown()
            self._listener(hold.token_one)
