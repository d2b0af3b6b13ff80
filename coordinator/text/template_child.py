"""The process that renders conversations: `python -m coordinator.text.template_child`.

Input is one JSON value per line: first a `Beginning`, then conversations. Each line is answered
with a `Rendered`. See coordinator/text/template_process.py.
"""

from __future__ import annotations

import resource
import signal
import sys

import msgspec

from coordinator.text.chat_template import ChatTemplate, TemplateInput
from coordinator.text.template_process import Beginning, Rendered
from pdserve.errors import InvalidRequest


def _serve() -> None:
    beginning = msgspec.json.decode(sys.stdin.buffer.readline(), type=Beginning)
    most = beginning.max_memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    template = ChatTemplate(beginning.source, beginning.special_tokens)
    conversations = msgspec.json.Decoder(TemplateInput)
    _tell(Rendered())
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, beginning.cpu_s)
        rendered = _rendered(template, conversations.decode(line))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _tell(rendered)


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


def _tell(rendered: Rendered) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(rendered) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    # Ctrl-C in a terminal goes to all processes, but this one ends with its parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve()
