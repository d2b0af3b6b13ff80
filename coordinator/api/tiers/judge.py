"""Whether an answer is good enough, by the rules of its tier, while it comes."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

from msgspec import structs

from coordinator.api.answer.choice import Choice
from coordinator.text.parts import AnswerParts
from pdserve.protocol import TokenEvent
from pdserve.settings.cascades import Escalation

KEPT: Final = ""  # no reason to ask the next tier


class Judge:
    """Looks at one answer."""

    def __init__(
        self,
        rule: Escalation,
        choice: Choice,
        *,
        has_grammar: bool,
        parts: AnswerParts | None,
        hook: Callable[[str], bool] | None,
    ) -> None:
        """
        Args:
            choice: takes in the answer's tokens, without their log-probabilities.
            has_grammar: whether the answer has to match one.
            parts: finds calls in the answer; None: no tools were offered.
            hook: whether a whole answer is not good enough; None: the rule has none.
        """
        self._rule = rule
        self._choice = choice
        self._has_grammar = has_grammar
        self._parts = parts
        self._hook = hook
        self._texts: list[str] = []
        self._num_judged = 0  # tokens, of which:
        self._logprobs = self._margins = 0.0  # sums
        self._lowest = inf
        self.is_content = False  # no rule can be broken any more

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the answer so far."""
        return self._choice.num_tokens

    def take_text(self) -> str:
        """Return the answer's text since this was called last."""
        while (delta := self._choice.take()) is not None:
            self._texts.append(delta.text)
        text = "".join(self._texts)
        self._texts.clear()
        return text

    def push(self, event: TokenEvent) -> str:
        """Take in more of the answer; return the rule that it breaks, or KEPT."""
        choice, rule = self._choice, self._rule
        if self.is_content or choice.is_finished:
            return KEPT
        before = choice.num_tokens
        choice.push(structs.replace(event, logprobs=[]))
        self._look_at(event, choice.num_tokens - before)
        if rule.max_tokens is not None and choice.num_tokens > rule.max_tokens:
            return "max_tokens"
        is_over = choice.is_finished or 0 < rule.first_tokens <= self._num_judged
        if rule.min_logprob is not None and self._lowest < rule.min_logprob:
            return "min_logprob"
        if is_over and (doubt := self._doubt()):
            return doubt
        if choice.is_finished and (fault := self._fault()):
            return fault
        self.is_content = choice.is_finished or (is_over and not rule.needs_whole_answer)
        return KEPT

    def _look_at(self, event: TokenEvent, num_new: int) -> None:
        """Note the log-probabilities of new tokens; what a stop string has cut off is none."""
        left = self._rule.first_tokens - self._num_judged if self._rule.first_tokens else num_new
        for logprobs in event.logprobs[: min(num_new, left)]:
            self._num_judged += 1
            self._logprobs += logprobs.chosen
            self._lowest = min(self._lowest, logprobs.chosen)
            if len(logprobs.top_logprobs) > 1:
                self._margins += logprobs.top_logprobs[0] - logprobs.top_logprobs[1]

    def _doubt(self) -> str:
        """Return which mean of the tokens so far is too low, or KEPT."""
        rule, num = self._rule, self._num_judged
        if not num:
            return KEPT
        if rule.mean_logprob is not None and self._logprobs / num < rule.mean_logprob:
            return "mean_logprob"
        if rule.margin is not None and self._margins / num < rule.margin:
            return "margin"
        return KEPT

    def _fault(self) -> str:
        """Return what the whole answer lacks, or KEPT."""
        if self._rule.grammar and self._has_grammar and self._choice.finish_reason == "length":
            return "grammar"
        if self._rule.tool and self._parts is not None:
            self._parts.push(self._text())
            self._parts.finish()
            if not self._parts.num_calls:
                return "tool"
        return "hook" if self._hook is not None and self._hook(self._text()) else KEPT

    def _text(self) -> str:
        """Return all of the answer, which may be asked for later."""
        text = self.take_text()
        self._texts.append(text)
        return text
