"""One stream as a head sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.drafts.guesses import Shares
from pdserve.engine.drafts.heads.head import Head, HeadKv, HeadRows
from pdserve.engine.drafts.model.stream import SURENESS
from pdserve.engine.request import Request
from pdserve.engine.steps.tapped import Tapped

_MOST_WAITING: Final = 32  # tokens, that a head computes later, with its next drafts


class HeadStream:
    """Implements `Drafter`: what the head has drafted behind the last step's rows."""

    def __init__(self, request: Request, head: Head, shares: Shares) -> None:
        """`shares`: of right drafts, of all streams."""
        self.request = request
        self.kv = HeadKv(head.pool, head.most_tokens)
        self._head = head
        self._shares_of_all = shares
        self._shares = Shares(shares)
        self._waiting: list[Tensor] = []  # rows that the head has not computed yet
        self._tokens: list[int] = []  # the tokens behind these
        self._known: list[int] = []  # those that the drafts are behind
        self._end = 0  # position behind these
        self._drafts: list[int] = []
        self._states = torch.empty(0)  # of the layer that has drafted the last of these
        # Of each layer but the last: what the next one goes on from, as far as tokens were known.
        self._kept: list[Tensor] = []
        self._num_output = 0  # output tokens before the drafts

    @property
    def num_waiting(self) -> int:
        """How many tokens there are to go on from; 0: nothing can be drafted."""
        return len(self._tokens)

    @property
    def likely(self) -> float:
        """How likely a draft is right, if those before it are."""
        return self._shares.of(SURENESS)

    def untried(self) -> None:
        """Note that no drafts were worth their time."""
        self._shares.forget(SURENESS)

    def take(self, tapped: Tapped) -> None:
        """Take in the rows of the last step, but for those behind drafts that were wrong."""
        self._learn()
        request, first, rows = self.request, tapped.first, torch.from_numpy(tapped.rows)
        count = min(len(rows), request.num_computed_tokens - first)
        if count <= 0 or first + count != request.num_tokens - 1:
            self.forget()
            return
        if first + 1 != self._end or self.num_waiting + count > _MOST_WAITING:
            self.forget()  # with a gap, distances would be wrong
        self._waiting.append(rows[:count])
        self._tokens += request.token_slice(first + 1, first + count + 1)
        self._end = first + count + 1

    def forget(self) -> None:
        """Begin anew, with the rows to come."""
        self._waiting, self._tokens = [], []
        self.kv.give_back()

    def begin(self) -> HeadRows:
        """Return all that waits, for the first draft. In the thread that computes steps."""
        states = self._head.entered(torch.cat(self._waiting))
        if not self.kv.num_tokens:
            self._kept = []
        self.kv.num_tokens += len(self._tokens)
        self._num_output = self._end - self.request.num_prompt_tokens
        self._known, self._waiting, self._tokens = self._tokens, [], []
        return self._rows(states, self.kv.num_tokens)

    def drafted(self, token: int, states: Tensor) -> None:
        """Take a draft, and what the layer that made it has computed."""
        self._drafts.append(token)
        self._states = states

    def behind(self) -> HeadRows:
        """Return what the next layer goes on from, for a further draft.

        A layer looks one token further than the one before it. So it also computes anew the row
        behind which that token was a draft, and needs the state that was kept of it.
        """
        number, states = len(self._drafts), self._states
        if number >= self._head.num_layers:
            return self._rows(states[-1:], self.kv.num_tokens + number + 1 - self._head.num_layers)
        further = number - 1
        before = self._kept[further:number]
        self._kept[further:number] = [states[-number:][:1] if len(states) >= number else states[:0]]
        return self._rows(torch.cat([*before, states]), self.kv.num_tokens)

    def _rows(self, states: Tensor, end: int) -> HeadRows:
        """Of the newest tokens, drafts included; `end`: behind their slots."""
        tokens = [*self._known, *self._drafts][-len(states) :]
        return HeadRows(
            tokens=tokens,
            states=states,
            position=self._end + len(self._drafts) - len(tokens),
            slot=end - len(tokens),
            block_table=self.kv.block_table,
        )

    def propose(self, request: Request, most: int) -> tuple[Sequence[int], int]:
        """As Drafter.propose."""
        is_here = len(request.output_token_ids) == self._num_output
        return (self._drafts[:most] if is_here else ()), SURENESS

    def _learn(self) -> None:
        said = self.request.output_token_ids[self._num_output :]
        drafts, self._drafts = self._drafts, []
        if not drafts or not said:
            return
        pairs = zip(said, drafts, strict=False)
        num_right = next((n for n, (a, b) in enumerate(pairs) if a != b), len(drafts))
        num_right = min(num_right, len(said), len(drafts))
        tried = min(len(drafts), num_right + 1, len(said))
        for shares in (self._shares, self._shares_of_all):
            shares.add(SURENESS, tried, num_right)
