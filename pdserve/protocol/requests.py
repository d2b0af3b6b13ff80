"""The sampling parameters of a request, and what it was promised."""

from __future__ import annotations

from enum import IntEnum

from pdserve.pooling import Pooling
from pdserve.protocol.message import Message


class FinishReason(IntEnum):
    """Why the output ended. The coordinator translates this into OpenAI's finish reasons."""

    STOP = 1  # an eos or stop token, or a stop string
    LENGTH = 2


class BadWord(Message, frozen=True):
    """One tokenisation of a text that must not appear in the output."""

    token_ids: list[int]  # at least one


class SamplingParams(Message, frozen=True):
    """How tokens are chosen. Sampling is a pure function of these, the logits and the history.

    The defaults are off or neutral.
    """

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] = []  # the only tokens that may be sampled; empty: all
    bad_words: list[BadWord] = []
    seed: int = 0  # always set: the coordinator draws one if the client gives none
    max_tokens: int = 16  # 0: only the prompt is computed, nothing is sampled
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logprobs: int | None = None  # None: none; n: of the chosen token and the n likeliest ones
    logprob_token_ids: list[int] = []  # with `logprobs`: listed instead of the n likeliest ones
    grammar: str = ""  # that the output must match (pdserve/grammar); empty: none
    prompt_logprobs: int | None = None  # as `logprobs`, for the prompt's tokens
    pooling: Pooling | None = None  # for an embedding of the prompt, with max_tokens 0; None: none

    @property
    def reuses_prefix(self) -> bool:
        """Whether cached KV can be used: scores and states of cached tokens are not available."""
        return self.prompt_logprobs is None and self.pooling in (None, Pooling.LAST)


class TokenLogprobs(Message, frozen=True):
    """Log-probabilities at one position, from the model's distribution before any filter."""

    chosen: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    rank: int = 0  # of the chosen token, from 1; 0: not computed (it is for prompts only)


class Slo(Message, frozen=True):
    """What a request was promised. Times are what remains of them when the leg is sent.

    They are durations, because the clocks of two machines differ. 0: not promised.
    """

    name: str = ""  # service class
    tenant: str = ""  # empty: none
    priority: int = 0  # higher goes first, and preempts lower
    weight: float = 1.0  # of its payer
    ttft_s: float = 0.0  # until token 1 is due; negative: overdue
    tpot_s: float = 0.0  # per token after token 1
    hold_s: float = 0.0  # for which token 1 may still be held back; negative: no longer
    deadline_s: float = 0.0  # until the request expires

    @property
    def payer(self) -> str:
        """Whose share the request counts against: payers of equal priority share by weight.

        A tenant is one payer, whichever classes it names.
        """
        return f"tenant {self.tenant}" if self.tenant else self.name
