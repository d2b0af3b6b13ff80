"""One stream as the draft model sees it: a request of its own, which the real one corrects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from pdserve.engine.drafts.guesses import Shares
from pdserve.engine.request import Request
from pdserve.protocol import SamplingParams

SURENESS: Final = 0  # nothing speaks for its drafts but how often they were right


class DraftedStream:
    """Implements `Drafter`: what the model has drafted, as far as the stream has not got there.

    Its drafts are drawn as the stream's tokens are: with its options, seed and positions. So two
    models that agree on the distribution agree on the token.
    """

    def __init__(
        self, request: Request, vocab_size: int, max_model_len: int, shares: Shares
    ) -> None:
        """
        Args:
            request: the stream.
            vocab_size: ids that both models know.
            max_model_len: of the draft model.
            shares: of right drafts, of all streams.
        """
        self.request = request
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._shares_of_all = shares
        self._shares = Shares(shares)
        self.shadow = Request(
            request_id=request.request_id,
            # An adapter is nothing that the draft model knows.
            prompt=replace(request.prompt, adapter="", adapted_from=0),
            sampling=_drawn_alike(request.sampling),
            lifecycle=request.lifecycle,
        )
        self._num_real = 0  # of the shadow's output tokens; the others are drafts
        self.is_over = not self._are_known(request.prompt_token_ids)  # no further drafts

    @property
    def drafts(self) -> Sequence[int]:
        """What may come next, as far as the stream was followed."""
        return self.shadow.output_token_ids[self._num_real :]

    @property
    def num_behind(self) -> int:
        """Tokens of the stream, the last one apart, that the draft model has not computed."""
        real = self.shadow.num_prompt_tokens + self._num_real
        return max(0, real - 1 - self.shadow.num_computed_tokens)

    @property
    def likely(self) -> float:
        """How likely a draft is right, if those before it are."""
        return self._shares.of(SURENESS)

    def untried(self) -> None:
        """Note that no drafts were worth their time."""
        self._shares.forget(SURENESS)

    def follow(self) -> None:
        """Take in what the stream has said since: drafts that turned out wrong are dropped."""
        shadow, output = self.shadow, self.request.output_token_ids
        said, drafts = output[self._num_real :], self.drafts
        if not said:
            return
        num_right = next(
            (n for n, (a, b) in enumerate(zip(said, drafts, strict=False)) if a != b),
            min(len(said), len(drafts)),
        )
        if drafts:
            tried = min(len(drafts), num_right + 1, len(said))
            self._shares.add(SURENESS, tried, num_right)
            self._shares_of_all.add(SURENESS, tried, num_right)
        if num_right < len(said):
            del shadow.output_token_ids[self._num_real + num_right :]
            num_kept = shadow.num_prompt_tokens + self._num_real + num_right
            shadow.num_computed_tokens = min(shadow.num_computed_tokens, num_kept)
            shadow.output_token_ids += said[num_right:]
            if num_right < len(drafts):
                shadow.edits = None  # they have followed what was not said
        self._num_real = len(output)
        self.is_over = self.is_over or not self._are_known(said)

    def end(self) -> None:
        """Draft no more; its blocks are gone."""
        self.is_over = True
        self.shadow.block_table = []
        del self.shadow.output_token_ids[self._num_real :]

    def room_for(self, num_drafts: int) -> int:
        """How many drafts there may be, of so many, within the draft model's context."""
        return max(0, min(num_drafts, self._max_model_len - self.request.num_tokens))

    def propose(self, request: Request, most: int) -> tuple[Sequence[int], int]:
        """As Drafter.propose."""
        self.follow()
        drafts = self.drafts[:most]
        return (drafts if self._are_known(drafts) else ()), SURENESS

    def _are_known(self, token_ids: Sequence[int]) -> bool:
        return not token_ids or max(token_ids) < self._vocab_size


def _drawn_alike(sampling: SamplingParams) -> SamplingParams:
    """Leave out what is not known here, a grammar, and what is asked for besides tokens."""
    return replace(
        sampling,
        max_tokens=max(1, sampling.max_tokens),
        grammar="",
        logprobs=None,
        logprob_token_ids=[],
        prompt_logprobs=None,
        pooling=None,
    )
