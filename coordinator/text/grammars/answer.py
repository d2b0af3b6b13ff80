"""A whole answer as one document: reasoning first, then output or tool calls."""

from __future__ import annotations

import json
from dataclasses import dataclass

from coordinator.text.grammars.calls import CallGrammar, SpecialId, mark
from coordinator.text.grammars.outputs import Output, Part
from coordinator.text.parts.reasoning import BEGIN, END


@dataclass(frozen=True, slots=True)
class Thinking:
    """A model that may reason before it answers: anything up to the end mark."""

    has_begun: bool  # the prompt ends inside
    special_id: SpecialId

    def rules(self) -> str:
        """Of a Lark grammar, `thinking` among them."""
        end = self.special_id(END)
        if end is None:
            text = "thoughts[lazy]: /(.|\\n)*" + END.replace("/", "\\/") + "/"
        else:
            text = f"thoughts: /(.|\\n)*/ <[{end}]>"
        thinking = "thoughts gap"
        if not self.has_begun:  # then it need not
            thinking = f"({mark(BEGIN, self.special_id)} {thinking})?"
        return f"thinking: {thinking}\n{text}\ngap: /[ \\n]{{0,4}}/"


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """What an answer may be: `output` or, where there are some, `calls`; at least one is given."""

    output: Output | None = None
    calls: CallGrammar | None = None
    thinking: Thinking | None = None

    def text(self) -> str:
        """For SamplingParams.grammar; not checked yet. Raises InvalidRequest."""
        if self.output is not None and self.calls is None and self.thinking is None:
            return _document([self.output.part()])
        parts = {} if self.output is None else {"output": self.output.part()}
        bodies = [f"@{name}" for name in parts]
        rules = []
        if self.calls is not None:
            bodies.append("calls")
            rules.append(self.calls.rules())
            parts |= self.calls.parts()
        head = ""
        if self.thinking is not None:
            head = "thinking "
            rules.append(self.thinking.rules())
        lark = "\n".join([f"start: {head}answer", f"answer: {' | '.join(bodies)}", *rules])
        named = [{"name": name} | part for name, part in parts.items()]
        return _document([{"lark_grammar": lark}, *named])


def _document(grammars: list[Part]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False)
