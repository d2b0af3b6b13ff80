"""The log-probabilities of many tokens in columns: a prompt's, or a stream's that is claimed."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.protocol.message import Message
from pdserve.protocol.requests import TokenLogprobs
from pdserve.shared.errors import MalformedMessage


class PromptLogprobs(Message, frozen=True):
    """Log-probabilities of the prompt's tokens from the second one on, or of all output tokens.

    As a list of TokenLogprobs, 2^17 of them would take most of a second to read. Each position has
    as many likeliest tokens as the others.
    """

    chosen: list[float] = []  # [num_positions]
    ranks: list[int] = []  # [num_positions]
    top_ids: list[int] = []  # [num_positions * num_top]
    top_logprobs: list[float] = []  # [num_positions * num_top]

    def __len__(self) -> int:
        return len(self.chosen)

    @classmethod
    def of(cls, found: Sequence[TokenLogprobs]) -> PromptLogprobs:
        """Return them in columns."""
        return cls(
            chosen=[logprobs.chosen for logprobs in found],
            ranks=[logprobs.rank for logprobs in found],
            top_ids=[token_id for logprobs in found for token_id in logprobs.top_ids],
            top_logprobs=[value for logprobs in found for value in logprobs.top_logprobs],
        )

    def within(self, begin: int, end: int) -> list[TokenLogprobs]:
        """Return those of positions [begin, end), as far as there are."""
        num_top = len(self.top_ids) // max(len(self.chosen), 1)
        return [
            TokenLogprobs(
                chosen=self.chosen[at],
                rank=self.ranks[at],
                top_ids=self.top_ids[at * num_top : (at + 1) * num_top],
                top_logprobs=self.top_logprobs[at * num_top : (at + 1) * num_top],
            )
            for at in range(begin, min(end, len(self.chosen)))
        ]

    def check(self) -> None:
        """Check the columns' lengths.

        Raises:
            MalformedMessage: they do not fit together.
        """
        num_positions, num_listed = len(self.chosen), len(self.top_ids)
        fits = len(self.ranks) == num_positions and len(self.top_logprobs) == num_listed
        if not fits or (num_listed % num_positions if num_positions else num_listed):
            raise MalformedMessage("PromptLogprobs: its columns do not fit together")
