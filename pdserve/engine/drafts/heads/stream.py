"""One stream as a head sees it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pdserve.engine.drafts.guesses import Shares
from pdserve.engine.drafts.heads.eagle3 import MOST_POSITIONS, Eagle3Head, HeadKv
from pdserve.engine.drafts.model.stream import SURENESS
from pdserve.engine.request import Request


class HeadStream:
    """Implements `Drafter`: what the head has drafted behind the last step's rows."""

    def __init__(self, request: Request, head: Eagle3Head, shares: Shares) -> None:
        """`shares`: of right drafts, of all streams."""
        self.request = request
        self._head = head
        self._kv = HeadKv()
        self._shares_of_all = shares
        self._shares = Shares(shares)
        self._fused: Tensor | None = None  # of tokens that the head has not computed yet
        self._tokens: list[int] = []  # the tokens behind these
        self._position = 0  # of the first of them
        self._drafts: list[int] = []
        self._num_output = 0  # output tokens before the drafts

    @property
    def can_draft(self) -> bool:
        """Whether there are rows to go on from."""
        return self._fused is not None

    @property
    def likely(self) -> float:
        """How likely a draft is right, if those before it are."""
        return self._shares.of(SURENESS)

    def untried(self) -> None:
        """Note that no drafts were worth their time."""
        self._shares.forget(SURENESS)

    def take(self, first: int, rows: Tensor) -> None:
        """Take in the rows of the last step, [n, num_taps, hidden], from the `first` position on.

        Those behind drafts that were wrong are left out.
        """
        self._learn()
        request = self.request
        count = min(len(rows), request.num_computed_tokens - first)
        if count <= 0 or first + count != request.num_tokens - 1:
            self._fused = None
            return
        self._fused = self._head.fused(rows[:count])
        self._tokens = request.token_slice(first + 1, first + count + 1)
        self._position = first + 1

    def draft(self, number: int) -> None:
        """Draft so many tokens. In the thread that computes steps."""
        assert self._fused is not None, "the caller has asked"
        drafts: list[int] = []
        token, state = self._head.step(self._tokens, self._fused, self._position, self._kv)
        self._kv.keep_last(MOST_POSITIONS)
        length, end = len(self._kv.keys), self._position + len(self._tokens)
        while True:
            drafts.append(token)
            if len(drafts) == number:
                break
            token, state = self._head.step([token], state, end + len(drafts) - 1, self._kv)
        self._kv.cut(length)
        self._fused = None
        self._drafts = drafts
        self._num_output = end - self.request.num_prompt_tokens

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
