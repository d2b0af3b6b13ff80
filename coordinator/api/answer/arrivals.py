"""Token events of running generations that have not been read yet.

Events are recorded and timestamped on arrival, while a node's message is being processed; the
single reader of `Arrivals` is woken once and takes all pending events: at once for the first and
the last of a generation, otherwise when it is its turn (`WriteTurns`). So a token needs no task
and no queue, and slow clients and busy coordinators see fewer, larger chunks. The backlog is
bounded by the requests' max_tokens.

Waking a reader costs far more than one more token for a reader that is woken anyway: it encodes an
event and writes to a socket. So readers are woken in turns of a few, and between turns is a rest
that lasts as long as the turns took. Most events of streams are taken without waking the reader's
task at all (`Arrivals.at_once`). Where little is to be written the rest is too short to be
noticed. Under load, streams are written less often and more at a time, and requests do not wait
behind them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from coordinator.generation import Generation
from pdserve._native import TokenRun
from pdserve.protocol import TokenEvent
from pdserve.shared.clock import Clock

NUM_PER_TURN = 8  # readers; after them, the event loop looks for requests and messages
_REST = 1.0  # seconds of rest for a second of turns
_SHORTEST_REST_S = 0.001  # timers of event loops are no finer
_LONGEST_REST_S = 0.05  # a process that had no core was not busy writing
PIECE = 512  # tokens turned into text; a few microseconds each
SCORED = 4  # what a token with log-probabilities counts for: up to 21 entries are encoded


class WriteTurns:
    """The readers that are due, first come, first served; one for all calls.

    Another one is for the pieces of long work (`LongWork`), one of them per turn.
    """

    def __init__(self, clock: Clock, num_per_turn: int = NUM_PER_TURN) -> None:
        self._clock = clock
        self._num_per_turn = num_per_turn
        self._due: deque[Callable[[], None]] = deque()
        self._is_set = False  # whether the next turn, or the end of this one, is scheduled
        self._begun_s = 0.0  # when this turn's readers began
        self._at_once_s = 0.0  # how long those took that needed no task
        self._next_s = 0.0  # when the next turn may come

    def wake(self, reader: Callable[[], None]) -> None:
        """Call `reader` when it is its turn: it does its work, or makes a task ready to do it."""
        self._due.append(reader)
        if not self._is_set:
            self._set()

    async def next_turn(self) -> None:
        """Return when it is the turn of the task that calls this."""
        turn = asyncio.get_running_loop().create_future()
        self.wake(lambda: None if turn.done() else turn.set_result(None))
        await turn

    def _set(self) -> None:
        self._is_set = True
        loop, rest_s = asyncio.get_running_loop(), self._next_s - self._clock.now()
        if rest_s < _SHORTEST_REST_S:
            loop.call_soon(self._turn)
        else:
            loop.call_later(rest_s, self._turn)

    def _turn(self) -> None:
        """Call a few readers. Tasks that they make ready run between `_begin` and `_end`."""
        loop, begun_s = asyncio.get_running_loop(), self._clock.now()
        loop.call_soon(self._begin)
        for _ in range(min(self._num_per_turn, len(self._due))):
            self._due.popleft()()
        self._at_once_s = self._clock.now() - begun_s
        loop.call_soon(self._end)

    def _begin(self) -> None:
        self._begun_s = self._clock.now() - self._at_once_s

    def _end(self) -> None:
        now_s = self._clock.now()
        next_s = max(self._next_s, self._begun_s) + (1 + _REST) * (now_s - self._begun_s)
        self._next_s = min(next_s, now_s + _LONGEST_REST_S)
        self._is_set = False
        if self._due:
            self._set()


class LongWork:
    """Long work for one call, in pieces between which other calls have their turn.

    Work is counted, not timed: a piece is what takes one or two milliseconds. `turns` are shared by
    the long work of all calls.
    """

    def __init__(self, turns: WriteTurns) -> None:
        self._turns = turns
        self._done = 0

    def restart(self) -> None:
        """Begin a new piece: the event loop has just had its turn."""
        self._done = 0

    async def did(self, amount: int) -> None:
        """Count work that was just done; at the end of a piece, wait for the next turn."""
        self._done += amount
        if self._done >= PIECE:
            self._done = 0
            await self._turns.next_turn()


class ArrivedEvent(msgspec.Struct, frozen=True):
    """A token event, the index of its generation, and its arrival time."""

    index: int
    event: TokenEvent
    at_s: float


def one_by_one(arrival: ArrivedEvent) -> Iterator[ArrivedEvent]:
    """Yield an event for each token: the first has what is about the prompt, the last the end."""
    event, last = arrival.event, len(arrival.event.token_ids) - 1
    if last < 1:
        yield arrival
        return
    for i, token_id in enumerate(event.token_ids):
        single = TokenEvent(
            request_id=event.request_id,
            index=event.index + i,
            token_ids=[token_id],
            logprobs=event.logprobs[i : i + 1],
            finish_reason=event.finish_reason if i == last else None,
            stop_token_id=event.stop_token_id if i == last else None,
            cached_tokens=0 if i else event.cached_tokens,
            prompt_logprobs=None if i else event.prompt_logprobs,
            accepted=int(i > last - event.accepted),
            refused=0 if i else event.refused,
            decode_precision_tokens=0 if i else event.decode_precision_tokens,
        )
        yield ArrivedEvent(arrival.index, single, arrival.at_s)


NO_CHOICES: Final[frozenset[int]] = frozenset()  # one for all: an empty set has 216 bytes
AtOnce = Callable[[list[ArrivedEvent]], bool]
RunAtOnce = Callable[[int, TokenRun], bool]


class _Heard:
    """A generation to which `Arrivals` listens."""

    __slots__ = ("_arrivals", "_index")

    def __init__(self, arrivals: Arrivals, index: int) -> None:
        self._arrivals = arrivals
        self._index = index

    def arrived(self, event: TokenEvent | Exception) -> None:
        self._arrivals.arrived(self._index, event)

    def ran_on(self, run: TokenRun) -> None:
        self._arrivals.ran_on(self._index, run)


class Arrivals:
    """The merged events of several generations. Has one reader, which must close it.

    `at_once`, if it is set, is given the pending events while the reader waits. It removes those
    that it takes, and returns whether the reader may go on waiting. `run_at_once` is given the run
    of a choice before, and reads it, or returns False. What they raise, the reader raises.
    """

    def __init__(self, generations: Sequence[Generation], clock: Clock, turns: WriteTurns) -> None:
        self.at_once: AtOnce | None = None
        self.run_at_once: RunAtOnce | None = None
        self._clock = clock
        self._turns = turns
        self._ready: list[ArrivedEvent] = []
        self._runs: dict[int, TokenRun] = {}  # with tokens that nobody has read, behind `_ready`
        self._error: Exception | None = None
        self._stopped = NO_CHOICES
        self._is_closed = False
        self._num_added = 0
        self._is_due = False  # whether a turn was asked for and has not come
        self._waiter: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None  # fires at `_quiet_until_s` or earlier
        self._quiet_until_s = 0.0  # end of the current wait, on the event loop's clock
        for generation in generations:
            self.add(generation)

    def add(self, generation: Generation) -> None:
        """Listen to one more generation; its index is the number of those added before it."""
        index = self._num_added
        self._num_added += 1
        heard = _Heard(self, index)
        generation.listen(heard.arrived, heard.ran_on)

    async def take(self, timeout_s: float | None = None) -> list[ArrivedEvent]:
        """Return all pending events in order of arrival, after waiting for one if there is none.

        Returns an empty list when `timeout_s` has passed. A generation's error is raised once all
        events that arrived before it have been taken.
        """
        if not (self._ready or self._runs) and self._error is None:
            await self._wait(timeout_s)
        self._read_runs()
        taken, self._ready = self._ready, []
        if not taken and self._error is not None:
            raise self._error
        return taken

    def stop(self, index: int) -> None:
        """Ignore further events of this generation, including its end."""
        self._stopped |= {index}
        self._runs.pop(index, None)

    def close(self) -> None:
        """Ignore further events of all generations."""
        self.at_once = self.run_at_once = None
        self._is_closed = True
        self._runs.clear()
        if self._alarm is not None:
            self._alarm.cancel()

    def arrived(self, index: int, event: TokenEvent | Exception) -> None:
        """Take in an event of a generation."""
        if self._is_closed or index in self._stopped:
            return
        self._read_runs()
        if isinstance(event, Exception):
            self._error = self._error or event
            self._wake()
            return
        self._ready.append(ArrivedEvent(index, event, self._clock.now()))
        if event.index == 0 or event.finish_reason is not None:
            self._wake()
        else:
            self._ask_for_turn()

    def ran_on(self, index: int, run: TokenRun) -> None:
        """Note that a generation's run has tokens."""
        if not (self._is_closed or index in self._stopped):
            self._runs[index] = run
            self._ask_for_turn()

    def _read_runs(self) -> None:
        """Make events of what is in the runs."""
        for index, run in self._runs.items():
            for first, token_ids, at_s in run.read():
                event = TokenEvent(request_id="", index=first, token_ids=token_ids)
                self._ready.append(ArrivedEvent(index, event, at_s))
        self._runs.clear()

    def _ask_for_turn(self) -> None:
        if self._waiter is not None and not self._is_due:
            self._is_due = True
            self._turns.wake(self._take_turn)

    async def _wait(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        if timeout_s is not None:
            self._quiet_until_s = loop.time() + timeout_s
            if self._alarm is None:
                self._alarm = loop.call_later(timeout_s, self._ring)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _ring(self) -> None:
        """Wake the reader if its wait has timed out; else set the timer again.

        The timer is not set at every wait, as tokens arrive far more often than it fires.
        """
        loop = asyncio.get_running_loop()
        self._alarm = None
        if self._waiter is None:
            return
        if loop.time() < self._quiet_until_s:
            self._alarm = loop.call_at(self._quiet_until_s, self._ring)
        else:
            self._wake()

    def _take_turn(self) -> None:
        self._is_due = False
        waiter = self._waiter
        if waiter is None or waiter.done() or not (self._ready or self._runs):
            return  # it has been woken since
        if self.at_once is None or self._error is not None:
            self._wake()
            return
        try:
            is_taken = not self._ready and self._are_runs_taken()
            if not is_taken:
                self._read_runs()
                is_taken = self.at_once(self._ready)
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader raises it
            self._error = error
            is_taken = False
        if not is_taken:
            self._wake()

    def _are_runs_taken(self) -> bool:
        if self.run_at_once is None:
            return False
        while self._runs:
            index, run = self._runs.popitem()
            if not self.run_at_once(index, run):
                self._runs[index] = run
                return False
        return True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
