"""One choice of an answer: converts token events to text and log-probabilities.

Tokens pass through the detokeniser and the stop matcher one at a time, so that the choice ends at
exactly the token that completes a stop string, however many tokens arrive in one event.
`TokenParts`
splits its text into parts, and counts the tokens of its reasoning.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import pairwise
from operator import add

import msgspec

from coordinator.api.plan.sampling import TextOptions
from coordinator.text import IncrementalDetokenizer, StopMatcher, Tokenizer
from coordinator.text.parts import AnswerParts, Parts
from pdserve._native import TextDecoder
from pdserve.protocol import FinishReason, PromptLogprobs, TokenEvent, TokenLogprobs

MAX_SCORED = 128  # tokens with log-probabilities in one delta: they are encoded in one piece

_FINISH_WORDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class ScoredToken(msgspec.Struct, frozen=True):
    """A token whose log-probabilities are to be shown."""

    token_id: int
    offset: int  # characters of the choice's text before it
    logprobs: TokenLogprobs | None  # None: the first prompt token, which has no predecessor


class ChoiceDelta(msgspec.Struct, frozen=True):
    """New content of a choice since the last delta; at most MAX_SCORED tokens have scores."""

    index: int
    text: str
    tokens: list[ScoredToken]
    finish_reason: str | None
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # of the prompt's next tokens, from its second on
    token_offsets: Sequence[int] = ()  # characters of text before each token, for all tokens so far
    stop_reason: str | int | None = None  # the stop string, or the client's stop token
    token_ids: Sequence[int] = ()  # new since the last delta, if the client wants token ids


class Choice:
    """One token stream as the client sees it."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        options: TextOptions,
        echoed_ids: Sequence[int] | None = None,
    ) -> None:
        """`echoed_ids`: the prompt's token ids, if it is echoed before the answer."""
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self._logprob = 0.0  # sum over the tokens so far, if they have log-probabilities
        self._options = options
        self._echoed_ids = echoed_ids
        self._num_echoed = 0
        self._prompt_logprobs: PromptLogprobs | None = None
        self._num_prompt_told = 0  # of the prompt's log-probabilities
        self._end_was_taken = False
        self._detokenizer = IncrementalDetokenizer(
            tokenizer.pieces,
            skip_special_tokens=options.skip_special_tokens,
            kept_ids=options.kept_ids,
        )
        self._matcher = StopMatcher(options.stops, include_stop=options.include_stop)
        self._content_start = options.content_start()
        self._num_decoded_chars = 0
        self._token_offsets: list[int] = []
        self._untold_ids: list[int] = []
        self._num_shown_chars = 0
        self._num_taken_chars = 0
        self._new_text: list[str] = []
        self._unshown: deque[ScoredToken] | None = None  # None: no token has a score

    @property
    def is_finished(self) -> bool:
        """Whether the choice has ended."""
        return self.finish_reason is not None

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens; 0 unless log-probabilities were requested."""
        return self._logprob / max(self.num_tokens, 1)

    @property
    def has_shown_text(self) -> bool:
        """Whether any text has become visible to the client."""
        return self._num_shown_chars > 0

    @property
    def ended_by_string(self) -> bool:
        """Whether a stop string ended the choice; the nodes do not know of stop strings."""
        return self._matcher.matched is not None

    @property
    def text_decoder(self) -> TextDecoder | None:
        """What makes text of further tokens, if there is nothing to tell but that; else None.

        Who decodes with it says so with `ran_on`.
        """
        options, decoder = self._options, self._detokenizer.decoder
        is_cut = bool(options.stops) or self._content_start is not None
        is_told_more = options.tells_ids or self._prompt_logprobs is not None
        return decoder if self.has_shown_text and not (is_cut or is_told_more) else None

    def ran_on(self, num_tokens: int, num_chars: int) -> None:
        """Note how much `text_decoder` has decoded."""
        self.num_tokens += num_tokens
        self._num_decoded_chars += num_chars
        self._num_shown_chars += num_chars
        self._num_taken_chars += num_chars

    def score_prompt(self, logprobs: PromptLogprobs) -> None:
        """Set the prompt's log-probabilities, from its second token on. Call before `push`."""
        self._prompt_logprobs = logprobs

    def push(self, event: TokenEvent) -> None:
        """Process an event's tokens; tokens after a stop string are dropped.

        What is to be echoed has to be echoed before.
        """
        last = len(event.token_ids) - 1
        for i, token_id in enumerate(event.token_ids):
            if self.is_finished:
                return
            is_end = i == last and token_id == event.stop_token_id
            logprobs = event.logprobs[i] if i < len(event.logprobs) else None
            self._push_token(
                token_id, logprobs, is_hidden=is_end and not self._options.include_stop
            )
        if event.finish_reason is not None and not self.is_finished:
            self._show(self._detokenizer.finish())
            if self._content_start is not None and not self.is_finished:
                self._show_content(self._content_start.finish())
            self._new_shown(self._matcher.finish())
            if not self.is_finished:
                self.finish_reason = _FINISH_WORDS[event.finish_reason]
                if event.stop_token_id in self._options.stop_ids:
                    self._stop_reason = event.stop_token_id

    def echo(self, num_tokens: int) -> bool:
        """Show up to `num_tokens` more of the echoed prompt; return False if none was left.

        Stop strings are not matched in it.
        """
        echoed, begin = self._echoed_ids or (), self._num_echoed
        self._num_echoed = min(begin + num_tokens, len(echoed))
        options, detokenizer = self._options, self._detokenizer
        detokenizer.skip_special_tokens = (
            options.skip_special_tokens and not options.echoes_special_tokens
        )
        for position, logprobs in zip(
            range(begin, self._num_echoed), self._echoed_logprobs(begin), strict=True
        ):
            if self._prompt_logprobs is not None:
                self._score(echoed[position], logprobs)
            text = detokenizer.push(echoed[position])
            self._num_decoded_chars += len(text)
            self._new_shown(text)
        detokenizer.skip_special_tokens = options.skip_special_tokens
        return self._num_echoed > begin

    def take(self) -> ChoiceDelta | None:
        """Return content that is new since the last call, or None if there is none to show.

        Where many tokens have log-probabilities, the next call returns more.
        """
        text = "".join(self._new_text)
        if self._end_was_taken or not (text or self.is_finished):
            return None
        scores = self._next_prompt_logprobs()
        tokens = self._next_scored() if len(scores) < MAX_SCORED else []
        is_all = len(scores) < MAX_SCORED and self._first_scored is None
        self._new_text.clear()
        if not is_all:  # the text of the tokens that are still to come comes with them
            first = self._first_scored
            end = first.offset - self._num_taken_chars if first is not None else len(text)
            text, rest = text[:end], text[end:]
            self._new_text.append(rest)
        self._num_taken_chars += len(text)
        self._end_was_taken = is_all and self.is_finished
        token_ids: list[int] = []
        if is_all:
            token_ids, self._untold_ids = self._untold_ids, token_ids
        return ChoiceDelta(
            self.index,
            text,
            tokens,
            self.finish_reason if is_all else None,
            prompt_logprobs=scores,
            token_offsets=self._token_offsets,
            stop_reason=self._matcher.matched or self._stop_reason,
            token_ids=token_ids,
        )

    def _echoed_logprobs(self, begin: int) -> Sequence[TokenLogprobs | None]:
        """Return those of the echoed tokens up to `_num_echoed`; the prompt's first has none."""
        found, end = self._prompt_logprobs, self._num_echoed
        if found is None:
            return [None] * (end - begin)
        first = [] if begin else [None][:end]
        return [*first, *found.within(max(begin - 1, 0), end - 1)]

    @property
    def _first_scored(self) -> ScoredToken | None:
        """The first token whose log-probabilities can be shown now, if there is one."""
        if not self._unshown:
            return None
        first, shows_all = self._unshown[0], self.is_finished and not self.ended_by_string
        return first if shows_all or first.offset < self._num_shown_chars else None

    def _next_scored(self) -> list[ScoredToken]:
        tokens: list[ScoredToken] = []
        while self._unshown and len(tokens) < MAX_SCORED and self._first_scored is not None:
            tokens.append(self._unshown.popleft())
        return tokens

    def _score(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if self._unshown is None:  # most calls have none, and a deque takes 600 bytes
            self._unshown = deque()
        self._unshown.append(ScoredToken(token_id, self._num_decoded_chars, logprobs))

    def _next_prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        if self._prompt_logprobs is None or not self._options.tells_prompt_logprobs:
            return ()
        begin = self._num_prompt_told
        scores = self._prompt_logprobs.within(begin, begin + MAX_SCORED)
        self._num_prompt_told += len(scores)
        return scores

    def _push_token(
        self, token_id: int, logprobs: TokenLogprobs | None, *, is_hidden: bool
    ) -> None:
        self.num_tokens += 1
        self._token_offsets.append(self._num_decoded_chars)
        if self._options.tells_ids:
            self._untold_ids.append(token_id)
        if logprobs is not None:
            self._logprob += logprobs.chosen
        # With echo, clients find the answer's tokens by their count, so none may be left out.
        if logprobs is not None and not (is_hidden and self._echoed_ids is None):
            self._score(token_id, logprobs)
        if is_hidden:
            return
        self._show(self._detokenizer.push(token_id))

    def _show(self, text: str) -> None:
        self._num_decoded_chars += len(text)
        if self._content_start is not None:
            before, text = self._content_start.push(text)
            self._new_shown(before)
        self._show_content(text)

    def _show_content(self, text: str) -> None:
        if self.num_tokens <= self._options.min_tokens:
            self._new_shown(text)
            return
        self._new_shown(self._matcher.push(text))
        if self._matcher.matched is not None:
            self.finish_reason = "stop"

    def _new_shown(self, text: str) -> None:
        self._num_shown_chars += len(text)
        if text:
            self._new_text.append(text)


class TokenParts:
    """The parts of one answer; use either `push` or `push_whole`."""

    def __init__(self, parts: AnswerParts) -> None:
        self.num_chars = 0  # of the text so far
        self._parts = parts
        self._offsets: Sequence[int] = ()  # characters before each token
        self._reasoning_end: int | None = None  # in tokens; None: it has not ended yet

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._parts.num_calls

    @property
    def is_content(self) -> bool:
        """Whether all further text is content, as it is."""
        return self._parts.is_content

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens, including those of the marks."""
        if self._parts.is_reasoning:
            return len(self._offsets)
        return self._reasoning_end or 0

    @property
    def is_in_call(self) -> bool:
        """Whether the text ends inside the arguments of a call."""
        return self._parts.is_in_call

    def push(self, delta: ChoiceDelta) -> Iterator[Parts]:
        """Yield the parts that are certain after each token of the delta's text.

        So their order is as they were written, however many tokens arrive together.
        """
        self._offsets = delta.token_offsets
        for text in self._cut(delta):
            was_reasoning = self._parts.is_reasoning
            parts = self._parts.push(text)
            self.num_chars += len(text)
            if (was_reasoning or parts.reasoning) and not self._parts.is_reasoning:
                self._reasoning_end = bisect_left(delta.token_offsets, self.num_chars)
            yield parts

    def push_whole(self, delta: ChoiceDelta) -> Parts:
        """Return the parts that are certain after the delta's text, by kind."""
        if not self._parts.may_reason:  # there is nothing more to count
            return self._parts.push(delta.text)
        return reduce(add, self.push(delta), Parts())

    def finish(self, last: ChoiceDelta) -> Parts:
        """End the answer; return the parts that were held back."""
        is_cut = last.finish_reason != "stop" or last.stop_reason is not None
        parts = self._parts.finish(is_cut=is_cut)
        if self._parts.num_late_chars:
            end = self.num_chars - self._parts.num_late_chars
            self._reasoning_end = bisect_left(self._offsets, end)
        return parts

    def _cut(self, delta: ChoiceDelta) -> Sequence[str]:
        """Cut the delta's text at token boundaries."""
        text, offsets, start = delta.text, delta.token_offsets, self.num_chars
        inner = offsets[bisect_right(offsets, start) : bisect_left(offsets, start + len(text))]
        cuts = [0, *(offset - start for offset in dict.fromkeys(inner)), len(text)]
        return [text[a:b] for a, b in pairwise(cuts) if b > a]
