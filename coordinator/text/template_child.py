"""The process that renders conversations: `python -m coordinator.text.template_child`.

Input is one JSON value per line: first a `Beginning`, then conversations. Each line is answered
with a `Rendered`. See coordinator/text/chat_template.py.
"""

from __future__ import annotations

import resource
import sys

import msgspec

from coordinator.text.chat_template import Beginning, ChatTemplate, Rendered, TemplateInput
from pdserve.shared.errors import InvalidRequest
from pdserve.shared.process.limited_child import answer_lines, leave_interrupts_to_parent, tell


def _serve() -> None:
    beginning = msgspec.json.decode(sys.stdin.buffer.readline(), type=Beginning)
    most = beginning.max_memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    template = ChatTemplate(beginning.source, beginning.special_tokens, beginning.tool_source)
    conversations = msgspec.json.Decoder(TemplateInput)
    tell(Rendered())
    answer_lines(lambda line: _rendered(template, conversations.decode(line)), beginning.cpu_s)


def _rendered(template: ChatTemplate, conversation: TemplateInput) -> Rendered:
    try:
        text = template.render(conversation)
        text.encode()
        return Rendered(text)
    except UnicodeEncodeError:
        return Rendered(fault="the chat template makes what is no text", param="messages")
    except InvalidRequest as error:
        return Rendered(fault=error.message, param=error.param)
    except MemoryError:
        return Rendered(fault="the chat template takes too much memory", param="messages")


if __name__ == "__main__":
    leave_interrupts_to_parent()
    _serve()
