"""Log-probabilities of streams that may be claimed: who claims one needs those of all its tokens.

The tokens themselves are kept by the stream's request anyway. A log-probability takes some 70
bytes with the id of its token, and each token may list many. So all streams of a node together may
keep `MOST`; beyond that the one with the most loses its own, and can no longer be claimed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdserve.protocol import PromptLogprobs, TokenLogprobs

MOST: Final = 1 << 19  # twice what one call may ask for


class KeptScores:
    """The log-probabilities of one node's streams, by leg id."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._of: dict[str, PromptLogprobs | None] = {}  # None: they are not complete
        self.num_kept = 0  # of all streams, chosen and listed ones

    def open(self, leg_id: str, emitted: PromptLogprobs | None, num_emitted: int) -> None:
        """Begin to keep those of a stream; `emitted`: of the tokens that it comes with."""
        columns = self._of[leg_id] = PromptLogprobs.of([])
        if emitted is not None:
            self._extend(columns, emitted)
        if len(columns) != num_emitted:
            self._lose(leg_id)
        self._curb()

    def add(self, leg_id: str, index: int, of_tokens: Sequence[TokenLogprobs]) -> None:
        """Keep those of a stream's next tokens, if its others are kept; `index`: of the first."""
        columns = self._of.get(leg_id)
        if columns is None:
            return
        new = PromptLogprobs.of(of_tokens)
        if index != len(columns) or not _fits(columns, of_tokens):
            self._lose(leg_id)
            return
        self._extend(columns, new)
        self._curb()

    def is_lost(self, leg_id: str) -> bool:
        """Whether a stream has some that are not kept."""
        return leg_id in self._of and self._of[leg_id] is None

    def of(self, leg_id: str) -> PromptLogprobs | None:
        """Those of a stream's tokens so far; None: it has none, or they are not kept."""
        return self._of.get(leg_id)

    def forget(self, leg_id: str) -> None:
        """Keep nothing of a stream any longer; unknown ids are ignored."""
        self._lose(leg_id)
        self._of.pop(leg_id, None)

    # ---- parts ---------------------------------------------------------------------------------

    def _extend(self, columns: PromptLogprobs, new: PromptLogprobs) -> None:
        columns.chosen.extend(new.chosen)
        columns.ranks.extend(new.ranks)
        columns.top_ids.extend(new.top_ids)
        columns.top_logprobs.extend(new.top_logprobs)
        self.num_kept += _size(new)

    def _lose(self, leg_id: str) -> None:
        columns = self._of.get(leg_id)
        if columns is not None:
            self.num_kept -= _size(columns)
            self._of[leg_id] = None

    def _curb(self) -> None:
        while self.num_kept > self._most:
            sizes = {leg_id: _size(c) for leg_id, c in self._of.items() if c is not None}
            self._lose(max(sizes, key=sizes.__getitem__))


def _size(columns: PromptLogprobs) -> int:
    return len(columns.chosen) + len(columns.top_ids)


def _fits(columns: PromptLogprobs, of_tokens: Sequence[TokenLogprobs]) -> bool:
    """Whether each of these tokens lists as many as those before."""
    listed = {len(each.top_ids) for each in of_tokens}
    if len(columns):
        listed.add(len(columns.top_ids) // len(columns))
    return len(listed) == 1
