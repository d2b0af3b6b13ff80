"""The generation requests of a call: one for each answer to each of its prompts.

Also how much one call may ask for: answers, echoed tokens, log-probabilities.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import structs

from coordinator.api.config import ApiConfig
from coordinator.api.plan.grammar import chat_grammar
from coordinator.api.plan.sampling import NO_IDS
from coordinator.api.prompt.fit import FittedPrompt
from coordinator.api.read.chat import ChatRequest
from coordinator.api.read.idempotency import KeyedCall, draw
from coordinator.api.read.terms import ServiceTerms
from coordinator.generation import GenerationRequest
from coordinator.models.model import Model
from coordinator.text import Tokenizer
from coordinator.text.grammars import Channels, Thinking
from coordinator.text.parts import AnswerParts, CallPiece, ToolFormat
from coordinator.text.parts.call_ids import mistral_id
from coordinator.text.parts.harmony import FinalStart, Harmony
from coordinator.text.parts.interface import FindsContent
from coordinator.text.parts.reasoning import BEGIN, END, ContentStart, Reasoning
from pdserve.protocol import SamplingParams
from pdserve.shared.errors import InvalidRequest

_LAST_TOKENS = 8  # tokens at a prompt's end that are searched for the reasoning mark
_WRITTEN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # by the model


class PartsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the answers of one call are split into parts."""

    tool_format: ToolFormat | None  # of the tools that may be called; None: none may
    offered: dict[str, dict[str, Any]]  # function |-> its parameters
    max_calls: int | None
    is_call: bool  # whether an answer has to be one
    has_channels: bool  # whether the model writes harmony
    has_begun: bool  # the prompt ends in a thought
    continues: bool  # the prompt ends in an answer
    is_separate: bool  # reasoning is no part of the content
    is_apart: bool  # as marks of the model divide them
    is_shown: bool
    is_streamed: bool
    kept_ids: frozenset[int]  # special tokens that mark tool calls
    grammar: str  # that the parts must match, for SamplingParams.grammar; "": any text
    shows_function_call: bool  # not tool calls: the request used the deprecated parameters
    keyed: KeyedCall | None
    taken: dict[tuple[int, str], int] = {}  # choice and id |-> the first call that has it

    @property
    def shows_reasoning(self) -> bool:
        """Whether reasoning is shown, apart from the content."""
        return (self.is_apart or self.has_channels) and self.is_shown

    def make(self) -> AnswerParts:
        """Make the parser of one choice."""
        if self.has_channels:
            channels = Harmony(
                self.offered if self.tool_format is not None else {},
                is_apart=self.is_separate,
                is_shown=self.is_shown,
                is_streamed=self.is_streamed,
                has_begun=self.continues,
            )
            return AnswerParts(None, None, self.max_calls, self.is_call, channels)
        reasoning = tools = None
        begins = self.tool_format.begins if self.tool_format is not None else ()
        if self.is_apart:
            reasoning = Reasoning(self.has_begun, self.is_shown, self.is_streamed, begins)
        if self.tool_format is not None:
            tools = self.tool_format.parser(self.offered)
        return AnswerParts(reasoning, tools, self.max_calls, self.is_call)

    def content_start(self) -> FindsContent | None:
        """Return what tells where a choice's content begins; None: at its beginning."""
        if self.has_channels:
            return None if self.continues else FinalStart()
        return ContentStart(Reasoning(self.has_begun)) if self.is_apart else None

    def make_id(self, choice: int, call: CallPiece) -> str:
        """Return the id of a call, of which this is the first piece."""
        drawn = draw(self.keyed, "call", choice, call.index)
        if self.tool_format is not ToolFormat.MISTRAL:
            return _id(drawn)
        written = call.call_id or ""
        is_good = _WRITTEN_ID.fullmatch(written) is not None
        if is_good and self.taken.setdefault((choice, written), call.index) == call.index:
            return written
        return mistral_id(drawn)


async def plan_parts(
    body: ChatRequest, prompt: Sequence[int], model: Model, config: ApiConfig, terms: ServiceTerms
) -> PartsPlan:
    """Return the parts plan of a call with this rendered prompt. Raises InvalidRequest."""
    tokenizer, splits_reasoning = model.tokenizer, config.splits_reasoning
    tool_format = model.tool_format if body.tools and body.tool_choice != "none" else None
    continues = bool(body.continue_final_message)
    has_begun = splits_reasoning and _ends_with_mark(prompt, tokenizer)
    is_separate = body.separate_reasoning is not False
    has_channels = model.tool_format is ToolFormat.HARMONY

    thinking: Thinking | Channels | None = None
    if has_channels and not continues:
        thinking = Channels(tokenizer.token_id)
    elif splits_reasoning and not continues:
        thinking = Thinking(has_begun, tokenizer.token_id(BEGIN), tokenizer.token_id(END))
    marked = model.tool_format if has_channels else tool_format
    marks = marked.marks if marked is not None else ()
    kept = (tokenizer.special_id(mark) for mark in marks)
    return PartsPlan(
        tool_format=tool_format,
        offered={
            tool.function.name: tool.function.parameters or {}
            for tool in body.tools or []
            if body.may_call(tool)
        },
        max_calls=1 if body.parallel_tool_calls is False else None,
        is_call=tool_format is not None and body.must_call,
        has_channels=has_channels,
        has_begun=has_begun,
        continues=continues,
        is_separate=is_separate,
        is_apart=splits_reasoning and is_separate,
        is_shown=body.include_reasoning is not False,
        is_streamed=body.stream_reasoning is not False,
        kept_ids=frozenset(i for i in kept if i is not None) or NO_IDS,
        grammar=await chat_grammar(body, tool_format, thinking, model, terms.slo.tenant),
        shows_function_call=bool(body.functions),
        keyed=terms.keyed,
    )


def _ends_with_mark(token_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    end = tokenizer.decode(token_ids[-_LAST_TOKENS:], skip_special_tokens=False)
    return end.rstrip().endswith(BEGIN)


def _id(drawn: int) -> str:
    return f"call_{drawn % 2**96:024x}"


MAX_LOGPROBS = 1 << 18  # of one call: of all its answers and prompts, each as often as returned
MAX_ECHOED_TOKENS = 1 << 18  # of one call: its answers together
_SEED_BITS = 63
_SEED_STEP = 0x5851F42D4C957F2D  # arbitrary, but odd: the choices of a call get different seeds


def for_prompt(
    shared: SamplingParams,
    prompt: FittedPrompt,
    *,
    seed: int,
    requested: int | None,
    default: int | None = None,
    num_answers: int = 1,
) -> SamplingParams:
    """Return the sampling parameters of a prompt's first answer.

    Args:
        shared: those of all prompts of the call.
        seed: any number; it is shortened to what nodes take.
        requested: the most tokens of an answer; None: `default`, or else as many as fit, and of
            which `num_answers` answers may have the log-probabilities.

    Raises InvalidRequest.
    """
    max_tokens = requested
    if max_tokens is None:
        max_tokens = prompt.num_left if default is None else min(default, prompt.num_left)
    if shared.min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' ({shared.min_tokens}) exceeds the tokens to generate ({max_tokens})",
            "min_tokens",
        )
    if requested is None and default is None:
        most = _most_scored_tokens(shared, len(prompt.token_ids), num_answers)
        if most is not None:
            max_tokens = max(1, shared.min_tokens, min(max_tokens, most))
    return structs.replace(shared, max_tokens=max_tokens, seed=seed % 2**_SEED_BITS)


def generations(
    request_id: str,
    token_ids: list[int],
    sampling: SamplingParams,
    terms: ServiceTerms,
    now_s: float,
    num_answers: int = 1,
    conversation: int | None = None,
) -> list[GenerationRequest]:
    """Return the requests for the answers to one prompt. Raises DeadlineExceeded.

    `conversation` is the same for all turns of one, of 32 bits; None: the prompt stands alone.
    Nodes do not keep what they have said of a prompt, so a stream whose prompt is scored cannot be
    claimed.
    """
    first = GenerationRequest(
        request_id=request_id,
        prompt=terms.prompt(token_ids),
        sampling=sampling,
        slo=terms.slo,
        waited_s=terms.waited_s(now_s),
        deadline_s=terms.deadline_s(now_s),
        wait_s=terms.wait_s,
        conversation=conversation,
        is_claimable=terms.keyed is not None and sampling.prompt_logprobs is None,
        span=terms.span,
    )
    return [first, *(_another(first, choice) for choice in range(1, num_answers))]


def check_amounts(
    requests: Sequence[GenerationRequest], num_per_prompt: int, max_answers: int, *, echoes: bool
) -> None:
    """Check that the requests of a call, grouped by prompt, are not too much together.

    Raises InvalidRequest.
    """
    if len(requests) > max_answers:
        raise InvalidRequest(
            f"the request asks for {len(requests)} answers, but this server generates at most "
            f"{max_answers} at the same time",
            "n" if num_per_prompt > 1 else "prompt",
        )
    if echoes:
        _check_echo(requests)
    _check_logprobs(requests, num_per_prompt, echoes=echoes)


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one of several choices of a prompt; choice 0 gets `seed` itself."""
    return (seed + choice * _SEED_STEP) % (1 << _SEED_BITS)


def _another(first: GenerationRequest, choice: int) -> GenerationRequest:
    sampling = structs.replace(
        first.sampling,
        seed=choice_seed(first.sampling.seed, choice),
        prompt_logprobs=None,  # scored once, for the first
    )
    return structs.replace(first, request_id=f"{first.request_id}-{choice}", sampling=sampling)


def _most_scored_tokens(
    sampling: SamplingParams, num_prompt_tokens: int, num_answers: int
) -> int | None:
    """Return how many tokens of each answer may have their log-probabilities; None: any number."""
    per_token = num_answers * _logprobs_per_token(sampling)
    if not per_token:
        return None
    left = MAX_LOGPROBS - num_answers * _prompt_logprobs(sampling, num_prompt_tokens)
    return left // per_token


def _check_echo(requests: Sequence[GenerationRequest]) -> None:
    num_echoed = sum(r.prompt.num_tokens for r in requests)
    if num_echoed > MAX_ECHOED_TOKENS:
        raise InvalidRequest(
            f"the answers would echo {num_echoed} prompt tokens, but those of one call can echo at "
            f"most {MAX_ECHOED_TOKENS}: ask for fewer answers, or leave out 'echo'",
            "echo",
        )


def _check_logprobs(
    requests: Sequence[GenerationRequest], num_per_prompt: int, *, echoes: bool
) -> None:
    """The first request of each group may have the prompt scored."""
    num_logprobs = 0
    for first in requests[::num_per_prompt]:
        per_token, num_prompt_tokens = (
            _logprobs_per_token(first.sampling),
            first.prompt.num_tokens,
        )
        of_prompt = max(
            num_prompt_tokens * per_token * echoes,
            _prompt_logprobs(first.sampling, num_prompt_tokens),
        )
        num_logprobs += num_per_prompt * (first.sampling.max_tokens * per_token + of_prompt)
    if num_logprobs > MAX_LOGPROBS:
        raise InvalidRequest(
            f"the call asks for up to {num_logprobs} log-probabilities (answers x tokens x listed "
            f"per token, those of prompts for each answer), but one call can have at most "
            f"{MAX_LOGPROBS}: ask for fewer answers, tokens, or likeliest tokens",
            "prompt_logprobs" if requests[0].sampling.logprobs is None else "logprobs",
        )


def _logprobs_per_token(sampling: SamplingParams) -> int:
    num_top = sampling.logprobs
    return 0 if num_top is None else 1 + max(num_top, len(sampling.logprob_token_ids))


def _prompt_logprobs(sampling: SamplingParams, num_prompt_tokens: int) -> int:
    num_top = sampling.prompt_logprobs
    return 0 if num_top is None else num_prompt_tokens * (num_top + 1)
