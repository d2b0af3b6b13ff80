"""The grammar of a whole answer: reasoning first, then output or tool calls."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar, Final

from coordinator.text.grammars.calls import CallGrammar, FindToken, mark
from coordinator.text.grammars.outputs import Output, Part, text_up_to, text_without
from coordinator.text.parts import reasoning
from coordinator.text.parts.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START

_MOST_THOUGHTS: Final = 8  # messages in a row


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning before the answer: any text up to the end mark."""

    has_begun: bool  # the prompt ends inside the reasoning
    begin_id: int | None  # the token of the begin mark; None: it is spelled out as text
    end_id: int | None  # the token of the end mark, likewise

    output: ClassVar[str] = ""  # a rule of what precedes output, and a space; "": nothing does

    @property
    def can_be_followed(self) -> bool:
        """Whether the grammar library can follow it.

        It cannot choose between a begin mark that is spelled out and an answer without reasoning.
        """
        return self.has_begun or (self.begin_id is not None and self.end_id is not None)

    def rules(self) -> str:
        """Return Lark rules, which define `thinking`."""
        thinking = "thoughts gap" if self.has_begun else f"(<[{self.begin_id}]> thoughts gap)?"
        if self.end_id is None:
            text = f"thoughts[lazy]: {text_up_to(reasoning.END)}"
        else:
            text = f"thoughts: THOUGHTS <[{self.end_id}]>\nTHOUGHTS: {text_without(reasoning.END)}"
        return f"thinking: {thinking}\n{text}\ngap: /[ \\n]{{0,4}}/"


@dataclass(frozen=True, slots=True)
class Channels:
    """Reasoning before the answer in a channel of its own, as `text/parts/harmony.py` has it."""

    find_token: FindToken
    output: ClassVar[str] = "final "

    @property
    def can_be_followed(self) -> bool:
        """Whether the grammar library can follow it: it cannot find marks that are text."""
        return all(self.find_token(text) is not None for text in (START, CHANNEL, MESSAGE, END))

    def rules(self) -> str:
        """Return Lark rules, which define `thinking` and `final`."""
        start, channel, message, constrain, end = (
            mark(text, self.find_token) for text in (START, CHANNEL, MESSAGE, CONSTRAIN, END)
        )
        thinking = f'{channel} "analysis" {message} THOUGHTS {end} {start} "assistant"'
        return (
            f"thinking: ({thinking}){{0,{_MOST_THOUGHTS}}}\n"
            f'final: {channel} "final" (/ ?/ {constrain} /[A-Za-z]{{1,8}}/)? {message}\n'
            r"THOUGHTS: /(.|\n)*/"
        )


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """What an answer may be: `output` or `calls`; at least one of the two is given."""

    output: Output | None = None
    calls: CallGrammar | None = None
    thinking: Thinking | Channels | None = None

    def text(self) -> str:
        """Return the text for SamplingParams.grammar, not checked yet. Raises InvalidRequest."""
        thinking = self.thinking if self.thinking and self.thinking.can_be_followed else None
        if self.output is not None and self.calls is None and thinking is None:
            return _document([self.output.part()])
        parts = {} if self.output is None else {"output": self.output.part()}
        before = thinking.output if thinking is not None else ""
        bodies = [f"{before}@{name}" for name in parts]
        rules = []
        if self.calls is not None:
            bodies.append("calls")
            rules.append(self.calls.rules())
            parts |= self.calls.parts()
        head = ""
        if thinking is not None:
            head = "thinking "
            rules.append(thinking.rules())
        lark = "\n".join([f"start: {head}answer", f"answer: {' | '.join(bodies)}", *rules])
        named = [{"name": name} | part for name, part in parts.items()]
        return _document([{"lark_grammar": lark}, *named])


def _document(grammars: list[Part]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False)
