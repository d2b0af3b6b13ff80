"""A whole answer as one document: reasoning first, then output or tool calls."""

from __future__ import annotations

import json
from dataclasses import dataclass

from coordinator.text.grammars.calls import CallGrammar
from coordinator.text.grammars.outputs import Output, Part
from coordinator.text.parts.reasoning import END

_ANY_TEXT = "/(.|\\n)*/"
_TEXT_WITH_END = "/(?s:.*)" + END.replace("/", "\\/") + "(?s:.*)/"
_UP_TO_END = "/(.|\\n)*" + END.replace("/", "\\/") + "/"


@dataclass(frozen=True, slots=True)
class Thinking:
    """A model that may reason before it answers: anything up to the end mark."""

    has_begun: bool  # the prompt ends inside
    begin_id: int | None  # the token of the begin mark; None: it is spelled out
    end_id: int | None

    @property
    def can_be_followed(self) -> bool:
        """The library cannot choose between a mark that is spelled out, and an answer without."""
        return self.has_begun or (self.begin_id is not None and self.end_id is not None)

    def rules(self) -> str:
        """Of a Lark grammar, `thinking` among them."""
        thinking = "thoughts gap" if self.has_begun else f"(<[{self.begin_id}]> thoughts gap)?"
        if self.end_id is None:
            text = f"thoughts[lazy]: {_UP_TO_END}"
        else:
            text = f"thoughts: TEXT <[{self.end_id}]>\nTEXT: {_ANY_TEXT} & ~{_TEXT_WITH_END}"
        return f"thinking: {thinking}\n{text}\ngap: /[ \\n]{{0,4}}/"


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """What an answer may be: `output` or, where there are some, `calls`; at least one is given."""

    output: Output | None = None
    calls: CallGrammar | None = None
    thinking: Thinking | None = None

    def text(self) -> str:
        """For SamplingParams.grammar; not checked yet. Raises InvalidRequest."""
        thinking = self.thinking if self.thinking and self.thinking.can_be_followed else None
        if self.output is not None and self.calls is None and thinking is None:
            return _document([self.output.part()])
        parts = {} if self.output is None else {"output": self.output.part()}
        bodies = [f"@{name}" for name in parts]
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
