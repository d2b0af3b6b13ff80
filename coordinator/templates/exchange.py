"""What a coordinator and a process that renders say to each other: one JSON value a line."""

from __future__ import annotations

import msgspec

from coordinator.templates.outline import Outline
from coordinator.templates.template import TemplateInput


class Beginning(msgspec.Struct, frozen=True):
    """The first line. It is answered with an empty `Rendered`; then come questions."""

    source: str
    tool_source: str
    special_tokens: dict[str, str]
    cpu_s: float  # CPU time limit per conversation, after which the process is killed
    max_memory_bytes: int


class Question(msgspec.Struct, frozen=True):
    """A conversation to render."""

    chat: TemplateInput
    wants_outline: bool = False


class Rendered(msgspec.Struct, frozen=True):
    """A rendered conversation, or why it cannot be rendered."""

    text: str = ""
    fault: str = ""
    param: str | None = None
    outline: Outline | None = None  # None: there is none, or it was not asked for
