"""A request inside the engine: counters, what follows from them, its end, and when a token is due.

A token is due according to the request's TTFT and TPOT targets. TPOT is a mean over the whole
answer. So a stream that was fast so far is ahead of schedule and has slack: token n + 1 is due n
target gaps after token 1, whenever token n was produced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pdserve.engine.prompt_results.work import PromptWork
from pdserve.engine.row_edits import RowEdits
from pdserve.grammar import CompiledGrammar
from pdserve.lifecycle import NO_TARGETS, Lifecycle, Targets
from pdserve.protocol import FinishReason, PrefixSource, Prompt, SamplingParams, TokenLogprobs
from pdserve.rules.batch import SAFETY

if TYPE_CHECKING:
    from pdserve.engine.drafts.guesses import Guesses
    from pdserve.engine.steps.tapped import Tapped


@dataclass(slots=True, eq=False)
class Request:
    """A request as the engine sees it.

    Steps advance `num_computed_tokens` (tokens whose KV is in the pool) towards `num_tokens`. A
    prompt being prefilled in chunks, a request adopted with its prompt's KV, and a decoding request
    differ only in the distance between the two.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    lifecycle: Lifecycle
    grammar: CompiledGrammar | None = None  # of `sampling.grammar`; set before it is submitted
    allowed_words: npt.NDArray[np.int32] | None = None  # mask of `sampling.allowed_token_ids`
    edits: RowEdits | None = None  # what changes its logits; made when it is first sampled
    output_token_ids: list[int] = field(default_factory=list)
    prediction: Sequence[int] = ()  # what its client expects it to say
    draft: Sequence[int] = ()  # tokens that may come next, computed in the step that is under way
    num_accepted: int = 0  # of its output: drafts, those before included that came from elsewhere
    num_refused: int = 0  # drafts that were wrong, likewise
    num_emitted_before: int = 0  # how many of these came from another node, before it was lost
    num_computed_tokens: int = 0
    num_pulled_tokens: int = 0  # those whose KV comes from another node, until it is adopted
    # Of the first of its tokens, how many have KV that weights of prefill nodes have made, where
    # decode nodes have others: only those have hashes. None: all nodes have the same.
    num_by_prefill: int | None = None
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    block_table: list[int] = field(default_factory=list)  # logical -> physical block id
    state_blocks: list[int] = field(default_factory=list)  # of its state, if the model has one
    state_source: list[int] = field(default_factory=list)  # of a snapshot, if it goes on behind one
    parts_at: int = 0  # tokens that it has in common with one before, if no snapshot is there
    kept_state: tuple[int, list[int]] | None = None  # by its step: behind so many tokens; blocks
    answer_state: bytes = b""  # hash of the block behind which its last one was kept
    num_passed: int = 0  # leading blocks whose companions it has given back: windows are beyond
    block_hashes: list[bytes] = field(default_factory=list)  # hash chain, one per full block
    num_matched_blocks: int = 0  # while waiting: leading blocks found in the prefix cache ...
    matched_version: int = -1  # ... at this `BlockPool.cache_version`
    leg_token_limit: int | None = None  # it ends here after so many output tokens: a prefill leg
    # after token 1, a stream that another node takes over with its next one
    targets: Targets = NO_TARGETS
    num_preemptions: int = 0
    expected_output: int = 0  # tokens, as its coordinator expects its whole answer; 0: unknown
    flows: bool = False  # it moves on before it is late, so prompts beside it need not spare it
    gave_place: bool = False  # preempted, and the place was due to another payer of its priority
    prefix_sources: list[PrefixSource] = field(default_factory=list)  # where to refetch lost KV
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the eos or stop token that ended it
    is_cancelled: bool = False
    siblings: list[Request] = field(default_factory=list)  # token 1 is sampled for them as well
    guesses: Guesses | None = None  # of what it will say; made when it first decodes here
    tapped: Tapped | None = None  # rows of its last step, for a head to go on from
    prompt_token_ids: list[int] = field(init=False)  # the prompt's: read for each row of a step
    prompt_work: PromptWork | None = field(init=False)  # if it wants more of its prompt than KV
    follows_tokens: bool = field(init=False)  # as of its sampling

    def __post_init__(self) -> None:
        """Set up what depends on other fields."""
        self.prompt_token_ids = self.prompt.token_ids
        self.prompt_work = (
            PromptWork(self.sampling, len(self.prompt_token_ids))
            if self.sampling.wants_prompt_results
            else None
        )
        self.follows_tokens = self.sampling.follows_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def answers(self) -> list[Request]:
        """This request and its siblings: all requests that share the computed prompt."""
        return [self, *self.siblings]

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens plus output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def goes_on(self) -> bool:
        """Whether its output was interrupted: it was preempted here, or its former node is gone."""
        return self.num_preemptions > 0 or self.num_emitted_before > 0

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens whose KV is not computed yet; 1 for a decoding request."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether it has output, and only its last token's KV is missing."""
        num_output = len(self.output_token_ids)  # inlined: this is the most called property
        return num_output > 0 and (
            len(self.prompt_token_ids) + num_output - self.num_computed_tokens == 1
        )

    @property
    def ends_with_prompt(self) -> bool:
        """Whether it ends with the last token of its prompt, so that nothing is sampled."""
        return self.sampling.max_tokens == 0

    @property
    def num_hashed_tokens(self) -> int:
        """Tokens whose full blocks may have hashes.

        Where decode nodes have weights of their own, what they make of an answer has none: a prompt
        that begins with it is computed by a prefill node.
        """
        return self.num_tokens if self.num_by_prefill is None else len(self.prompt_token_ids)

    @property
    def num_prompt_misfits(self) -> int:
        """Tokens of its prompt whose KV is made by decode nodes, and should be by prefill nodes."""
        if self.num_by_prefill is None:
            return 0
        return max(0, len(self.prompt_token_ids) - self.num_by_prefill)

    @property
    def is_of_two_weights(self) -> bool:
        """Whether other weights than those of this node have made its prompt's KV, all of it."""
        return self.num_by_prefill is not None and self.num_prompt_misfits == 0

    @property
    def is_prefill_leg(self) -> bool:
        """Whether it ends here with its next token: another node decodes it, or nobody does."""
        return self.leg_token_limit is not None

    @property
    def handed_off_at(self) -> int | None:
        """How many tokens have KV when it ends here and goes on elsewhere; None: it stays."""
        if self.leg_token_limit is None:
            return None
        return len(self.prompt_token_ids) + self.leg_token_limit - 1

    @property
    def decodes_here(self) -> bool:
        """Whether it decodes on this node, and so will grow."""
        return self.leg_token_limit is None and self.sampling.max_tokens > 0

    @property
    def ends_with_next(self) -> bool:
        """Whether it certainly ends here with its next token, whichever that is."""
        num_output = len(self.output_token_ids) + 1
        limit = self.leg_token_limit
        return num_output >= self.sampling.max_tokens or (limit is not None and num_output >= limit)

    @property
    def num_reusable_tokens(self) -> int:
        """Number of leading tokens that need not be computed if their KV is available.

        At least one token must be computed, to get logits, and so must all tokens that are still to
        be scored or pooled.
        """
        if self.prompt_work is None or self.output_token_ids:
            return min(self.num_tokens - 1, self.num_hashed_tokens)
        return self.prompt_work.num_reusable_tokens

    @property
    def is_done(self) -> bool:
        """Whether the engine has no work left for it: cancelled, finished or at the leg limit."""
        return (
            self.is_cancelled
            or self.finish_reason is not None
            or (
                self.leg_token_limit is not None
                and len(self.output_token_ids) >= self.leg_token_limit
            )
        )

    def token_slice(self, start: int, end: int) -> list[int]:
        """Return the token ids at positions [start, end) of prompt + output."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]

    def extend_hashes(self, num_tokens: int, block_size: int) -> None:
        """Extend `block_hashes` to cover the full blocks of the first `num_tokens` tokens."""
        num_tokens = min(num_tokens, self.num_hashed_tokens)
        self.prompt.extend_hashes(self.block_hashes, self.token_slice, num_tokens, block_size)


class Ahead(Request):
    """A request as it will be if its first drafts are right: what a draw needs of it, and no more.

    Other attributes are not set. Its output, which may be long, is made for those who ask for it.
    """

    __slots__ = ("base", "num_drafts")

    base: Request  # as it is
    num_drafts: int  # that are output then

    @classmethod
    def of(cls, request: Request, num_drafts: int) -> Ahead:
        """The request with so many of its drafts as output."""
        ahead = cls.__new__(cls)
        ahead.base = request
        ahead.num_drafts = num_drafts
        ahead.request_id = request.request_id
        ahead.prompt_token_ids = request.prompt_token_ids
        ahead.sampling = request.sampling
        ahead.allowed_words = request.allowed_words
        ahead.siblings = []
        return ahead

    def __getattr__(self, name: str) -> list[int]:
        """Make the output, the first time that it is read."""
        if name != "output_token_ids":
            raise AttributeError(f"{name} is not set of a request with drafts")
        base = self.base
        self.output_token_ids = [*base.output_token_ids, *base.draft[: self.num_drafts]]
        return self.output_token_ids

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens plus output tokens, drafts included."""
        return self.base.num_tokens + self.num_drafts


class Scheduled(NamedTuple):
    """One row of a step's plan: compute `num_tokens` more tokens of `request`.

    The request's draft is computed behind its last token, and a token is sampled after each.
    """

    request: Request
    num_tokens: int

    @property
    def reaches_end(self) -> bool:
        """Whether this step computes the request's last token."""
        return self.num_tokens >= self.request.num_uncomputed_tokens

    @property
    def samples(self) -> bool:
        """Whether this step computes the request's last token and samples the next one."""
        request = self.request  # inlined: this is evaluated for each row of each step
        if request.sampling.max_tokens == 0:  # `ends_with_prompt`
            return False
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        return self.num_tokens >= num_tokens - request.num_computed_tokens


_MAKE_ROW = partial(tuple.__new__, Scheduled)


def one_token_each(requests: Sequence[Request]) -> list[Scheduled]:
    """Return a row of one token for each decoding request.

    Builds the tuples as `Scheduled._make` does, but without a Python call per row: this runs for
    each row of each step.
    """
    return list(map(_MAKE_ROW, zip(requests, repeat(1))))


_ADAPTER_OF: Final = attrgetter("request.prompt.adapter")


def by_adapter(rows: list[Scheduled]) -> list[Scheduled]:
    """Bring the rows of each adapter together, so that a step reads it once for all of them."""
    if not any(map(_ADAPTER_OF, rows)):
        return rows
    return sorted(rows, key=_ADAPTER_OF)


class SampledToken(msgspec.Struct, frozen=True):
    """What a step sampled for one request. A struct because each row of each step makes one."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    siblings: tuple[SampledToken, ...] = ()  # with token 1: the tokens of the request's siblings
    after: tuple[SampledToken, ...] = ()  # further tokens of the same step, behind right drafts
    refused: int = 0  # drafts of the step that were not right, or came too late


def end_after(
    request: Request, token_id: int, num_output: int, eos_token_ids: frozenset[int]
) -> FinishReason | None:
    """Return why the request ends with this token, its `num_output`-th; None if it goes on.

    If a stop token is also the last token allowed, the reason is STOP: the model was done.

    Args:
        request: whose parameters count.
        token_id: of its output.
        num_output: number of output tokens, this one included.
        eos_token_ids: of the model; ignored if the request sets `ignore_eos`.
    """
    sampling = request.sampling
    is_ending = token_id in sampling.stop_token_ids or (
        token_id in eos_token_ids and not sampling.ignore_eos
    )
    if is_ending and num_output >= sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output >= sampling.max_tokens else None


def finish(request: Request, eos_token_ids: frozenset[int]) -> None:
    """Set `finish_reason` and `stop_token_id` if the newest output token ends the request.

    To be called after appending a token that may end the request. Arguments as for `end_after`.
    """
    output = request.output_token_ids
    reason = end_after(request, output[-1], len(output), eos_token_ids)
    request.finish_reason = reason
    if reason is FinishReason.STOP:
        request.stop_token_id = output[-1]


def next_due_s(request: Request, default_tpot_s: float = inf) -> float:
    """Return when the next token is due; infinity if the request has no target for it.

    Args:
        request: decoding, or on its way to token 1.
        default_tpot_s: for requests without a TPOT target.
    """
    if not request.output_token_ids:
        return request.targets.first_token_s
    began_s, num_before = shown_s(request), 0
    if began_s is None:  # it goes on here: its leg says when its first token of this node is due
        began_s, num_before = request.targets.first_token_s, request.num_emitted_before
    num_gaps = len(request.output_token_ids) - num_before
    return began_s + num_gaps * tpot_s(request, default_tpot_s) if num_gaps else began_s


def step_limit_s(streams: Iterable[Request], now_s: float, default_tpot_s: float) -> float:
    """Return how long a step that decodes these streams may take; infinity for none.

    That is the pace that is aimed at, or less for a stream that is behind its schedule. Time that
    one is ahead is not spent: it is for steps that take longer than predicted.
    """
    return min(
        (
            min(SAFETY * tpot_s(stream, default_tpot_s), next_due_s(stream, default_tpot_s) - now_s)
            for stream in streams
        ),
        default=inf,
    )


def tpot_s(request: Request, default_tpot_s: float) -> float:
    """Return the request's TPOT target, or the default if it has none."""
    promised_s = request.targets.tpot_s
    return promised_s if promised_s < inf else default_tpot_s


def shown_s(request: Request, now_s: float = -inf) -> float | None:
    """Return when the client received token 1, or None if unknown.

    If token 1 was sampled on another node, this is an estimate: while the request waits for room
    here, token 1 is assumed to be held back as long as its targets allow. The coordinator does so
    once a request has waited for a while (`coordinator/routing/loads/books.py`). `now_s` is needed
    for requests that are still waiting.
    """
    lifecycle = request.lifecycle
    if lifecycle.first_token_s is not None or lifecycle.prefill_end_s is None:
        return lifecycle.first_token_s
    waited_until_s = lifecycle.room_wait[1] if lifecycle.room_wait else now_s
    return max(lifecycle.prefill_end_s, min(waited_until_s, request.targets.held_until_s))
