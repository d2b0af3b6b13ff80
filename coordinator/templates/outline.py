"""What a template makes of all chats of one shape: a text with holes, to be filled with contents.

The shape of a chat is all but the contents of its messages: roles, tools, variables. Templates are
mostly about the shape; contents they copy, at most without the white space around, or ask whether
there is a mark in them. So what a process has rendered once (`traced.py`) serves other chats of the
shape, if a template would get the same answers about their contents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from coordinator.templates.template import TemplateInput

MAX_CHARS: Final = 1 << 18  # in contents that are filled in; more are rendered
_MAX_SHAPE_BYTES: Final = 1 << 16
_MAX_TEXT_CHARS: Final = 1 << 16  # that an outline has itself
_MAX_GUARDS: Final = 128
_MAX_SHAPES: Final = 128  # with all that these bounds allow, they take 64 MiB
_MAX_OUTLINES: Final = 4  # of a shape
_MAX_VAIN: Final = 4  # chats of a shape without one, after which none is asked for

Cut = tuple[Literal["strip", "lstrip", "rstrip"], str | None]
"""The method of `str` that cuts something off, and its argument."""


class Hole(msgspec.Struct, frozen=True, array_like=True):
    """The content of a message."""

    message: int
    cuts: tuple[Cut, ...] = ()

    def text(self, contents: Sequence[str]) -> str:
        """Return what fills it."""
        text = contents[self.message]
        for method, chars in self.cuts:
            text = getattr(text, method)(chars)
        return text


class Guard(msgspec.Struct, frozen=True, array_like=True):
    """What a template asked about a content, and the answer that it got."""

    hole: Hole
    question: Literal["startswith", "endswith", "contains", "equals"]
    text: str
    answer: bool

    def holds(self, contents: Sequence[str]) -> bool:
        """Whether these contents would get the same answer."""
        return asked(self.hole.text(contents), self.question, self.text) == self.answer


def asked(content: str, question: str, text: str) -> bool:
    """Return the answer to a guard's question about a content."""
    match question:
        case "startswith":
            return content.startswith(text)
        case "endswith":
            return content.endswith(text)
        case "contains":
            return text in content
        case _:
            return content == text


class Outline(msgspec.Struct, frozen=True, array_like=True):
    """A rendered text with holes, and what holds for the contents that may fill them."""

    parts: tuple[str | Hole, ...]
    guards: tuple[Guard, ...] = ()

    def filled(self, contents: Sequence[str]) -> str | None:
        """Return the text of a chat with these contents; None: it may be another one."""
        if not all(guard.holds(contents) for guard in self.guards):
            return None
        return "".join(
            [part if isinstance(part, str) else part.text(contents) for part in self.parts]
        )

    @property
    def is_small(self) -> bool:
        """Whether it may be kept."""
        num_chars = sum(len(part) for part in self.parts if isinstance(part, str))
        num_chars += sum(len(guard.text) for guard in self.guards)
        return num_chars <= _MAX_TEXT_CHARS and len(self.guards) <= _MAX_GUARDS


def shape_of(chat: TemplateInput) -> bytes | None:
    """Return the shape of a chat that could be filled into an outline, or be rendered to one.

    None: it has more than roles and contents, or is too long.
    """
    if chat.continue_final_message or chat.num_chars > MAX_CHARS:
        return None
    roles: list[str] = []
    for message in chat.messages:
        if len(message) != 2:  # a call, a name
            return None
        roles.append(message["role"])
    others = chat.add_generation_prompt, chat.variables, chat.tools, chat.documents
    shape = msgspec.json.encode((roles, *others))
    return shape if len(shape) <= _MAX_SHAPE_BYTES else None


class Outlines:
    """The outlines of one template, of the shapes that were used last."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, list[Outline]] = OrderedDict()
        self._num_vain: dict[bytes, int] = {}  # of these: chats that were rendered to none
        self._tried: set[bytes] = set()  # shapes of which a chat is being rendered to one

    def text(self, shape: bytes, chat: TemplateInput) -> str | None:
        """Return the text of a chat of this shape; None: it has to be rendered."""
        outlines = self._found.get(shape)
        if outlines is None:
            return None
        self._found.move_to_end(shape)
        contents = [message["content"] for message in chat.messages]
        return next((text for one in outlines if (text := one.filled(contents)) is not None), None)

    def wants(self, shape: bytes) -> bool:
        """Whether a chat of this shape is to be rendered to an outline, too: then `add` follows.

        Of chats that come at the same time, only one is.
        """
        if shape in self._tried or self._num_vain.get(shape, 0) >= _MAX_VAIN:
            return False
        self._tried.add(shape)
        return True

    def add(self, shape: bytes, outline: Outline | None) -> None:
        """Note what came of that."""
        self._tried.discard(shape)
        outlines = self._found.setdefault(shape, [])
        self._found.move_to_end(shape)
        if outline is not None and outline.is_small:
            outlines.insert(0, outline)
            del outlines[_MAX_OUTLINES:]
        else:
            self._num_vain[shape] = self._num_vain.get(shape, 0) + 1
        if len(self._found) > _MAX_SHAPES:
            forgotten, _ = self._found.popitem(last=False)
            self._num_vain.pop(forgotten, None)
