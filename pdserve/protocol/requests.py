"""What a request asks for, and what it was promised."""

from __future__ import annotations

from enum import IntEnum

from pdserve.pooling import Pooling
from pdserve.protocol.message import Message


class FinishReason(IntEnum):
    """Why a sequence ended (the OpenAI words are the coordinator's business)."""

    STOP = 1  # an eos or stop token, or a stop string
    LENGTH = 2


class SamplingParams(Message, frozen=True):
    """How tokens are chosen. Sampling is a pure function of these, the logits and the history."""

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0  # always set: the coordinator draws one when the client gives none
    max_tokens: int = 16  # 0: the request ends with its prompt, and nothing is sampled
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logprobs: int | None = None  # None = none; n = the chosen token's and the n likeliest
    grammar: str = ""  # that the output must match (pdserve/grammar); empty: none
    prompt_logprobs: int | None = None  # as `logprobs`, of the prompt's tokens
    pooling: Pooling | None = None  # of the prompt's embedding, if max_tokens is 0; None = none

    @property
    def reuses_prefix(self) -> bool:
        """Whether cached KV saves computing. What is told of a token itself needs more than KV."""
        return self.prompt_logprobs is None and self.pooling in (None, Pooling.LAST)


class TokenLogprobs(Message, frozen=True):
    """Log-probabilities at one position, from the unmodified distribution of the model."""

    chosen: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    rank: int = 0  # of the chosen token, from 1; 0 = not counted, as it is for prompts alone


class Slo(Message, frozen=True):
    """What a client was promised. Times are what is left of them as a leg is sent.

    Clocks of two machines differ, durations do not. 0 stands for: nothing was promised.
    """

    name: str = ""  # of its class
    tenant: str = ""  # whose request it is; empty: nobody's in particular
    priority: int = 0  # higher ones go first, and preempt
    weight: float = 1.0  # of its payer
    ttft_s: float = 0.0  # until token 1 is due; negative: it is overdue
    tpot_s: float = 0.0  # for each token from then on
    hold_s: float = 0.0  # while token 1 may be held back; negative: no longer
    deadline_s: float = 0.0  # until nobody wants the answer any more

    @property
    def payer(self) -> str:
        """Against whose share it counts: payers of equal priority share nodes by their weights."""
        return f"{self.name}/{self.tenant}" if self.tenant else self.name
