"""A process that renders conversations: `python -m coordinator.templates.child`.

Its input is a `Beginning`, and then questions (`exchange.py`). Each line is answered with a
`Rendered`.
"""

from __future__ import annotations

import resource
import sys
import time

import msgspec

from coordinator.templates.exchange import Beginning, Question, Rendered
from coordinator.templates.template import ChatTemplate
from coordinator.templates.traced import Tracer
from pdserve.shared.errors import InvalidRequest
from pdserve.shared.process.limited_child import answer_lines, leave_interrupts_to_parent, tell

_TRACED_SHARE = 0.25  # of the time limit: an outline takes as long as the text


def _serve() -> None:
    beginning = msgspec.json.decode(sys.stdin.buffer.readline(), type=Beginning)
    most = beginning.max_memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    template = ChatTemplate(beginning.source, beginning.special_tokens, beginning.tool_source)
    renderer = _Renderer(template, _TRACED_SHARE * beginning.cpu_s)
    tell(Rendered())
    answer_lines(renderer.answer, beginning.cpu_s)


class _Renderer:
    def __init__(self, template: ChatTemplate, traced_s: float) -> None:
        self._template = template
        self._tracer = Tracer(template)
        self._traced_s = traced_s
        self._questions = msgspec.json.Decoder(Question)

    def answer(self, line: bytes) -> Rendered:
        try:
            return self._rendered(self._questions.decode(line))
        except UnicodeEncodeError:
            return Rendered(fault="the chat template makes what is no text", param="messages")
        except InvalidRequest as error:
            return Rendered(fault=error.message, param=error.param)
        except MemoryError:
            return Rendered(fault="the chat template takes too much memory", param="messages")

    def _rendered(self, question: Question) -> Rendered:
        chat, began_s = question.chat, time.process_time()
        text = self._template.render(chat)
        text.encode()
        is_brief = time.process_time() - began_s < self._traced_s
        traces = question.wants_outline and is_brief
        return Rendered(text, outline=self._tracer.outline(chat, text) if traces else None)


if __name__ == "__main__":
    leave_interrupts_to_parent()
    _serve()
