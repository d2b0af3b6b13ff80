"""Renders a conversation to an outline, with contents that know what a template does to them.

In place of each content the template gets an object that is no text (`HeldText`). It can be
written, joined to other text, cut at its ends and asked some questions, which are noted. Whatever
else is done to it ends the attempt: it is not text, so no operation takes it for one unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import Frame
from jinja2.filters import do_trim
from markupsafe import soft_str

from coordinator.templates.outline import Cut, Guard, Hole, Outline, asked
from coordinator.templates.sandbox import ChatEnvironment, LiteralCode
from coordinator.templates.template import ChatTemplate, TemplateInput


class NoOutline(BaseException):  # so that no template's or filter's own handling catches it
    """The template does more with a content than an outline can tell."""


def _ends(*_: object, **__: object) -> NoReturn:
    raise NoOutline


class HeldText:
    """Text of which some is the contents of messages."""

    __slots__ = ("_guards", "_parts", "_text")

    def __init__(self, guards: list[Guard], parts: tuple[str | Hole, ...], text: str) -> None:
        """`guards`: to note questions in; `text`: what the parts are in this conversation."""
        self._guards = guards
        self._parts = parts
        self._text = text

    # ---- what templates may do -----------------------------------------------------------------

    def strip(self, chars: str | None = None) -> HeldText:
        """As of `str`."""
        return self._cut("strip", chars)

    def lstrip(self, chars: str | None = None) -> HeldText:
        """As of `str`."""
        return self._cut("lstrip", chars)

    def rstrip(self, chars: str | None = None) -> HeldText:
        """As of `str`."""
        return self._cut("rstrip", chars)

    def startswith(self, prefix: str) -> bool:
        """As of `str`."""
        return self._ask("startswith", prefix)

    def endswith(self, suffix: str) -> bool:
        """As of `str`."""
        return self._ask("endswith", suffix)

    def __contains__(self, part: object) -> bool:
        return self._ask("contains", part)

    def __eq__(self, other: object) -> bool:
        return self._ask("equals", other)

    def __ne__(self, other: object) -> bool:
        return not self._ask("equals", other)

    def __bool__(self) -> bool:
        if any(isinstance(part, str) and part for part in self._parts):
            return True
        return not self._ask("equals", "")

    def __add__(self, other: object) -> HeldText:
        return self._joined(self, other)

    def __radd__(self, other: object) -> HeldText:
        return self._joined(other, self)

    # ---- what they may not, of which some would do without these ---------------------------------

    __str__ = __repr__ = __hash__ = _ends
    __len__ = __iter__ = __reversed__ = __getitem__ = _ends
    __int__ = __float__ = __index__ = __getattr__ = _ends

    # ---- parts ---------------------------------------------------------------------------------

    @property
    def _hole(self) -> Hole:
        if len(self._parts) == 1 and isinstance(self._parts[0], Hole):
            return self._parts[0]
        raise NoOutline

    def _cut(self, method: Any, chars: str | None) -> HeldText:
        hole, cut = self._hole, getattr(self._text, method)(chars)
        cuts: tuple[Cut, ...] = (*hole.cuts, (method, chars))
        return HeldText(self._guards, (Hole(hole.message, cuts),), cut)

    def _ask(self, question: Any, text: object) -> bool:
        if not isinstance(text, str):
            raise NoOutline
        answer = asked(self._text, question, text)
        self._guards.append(Guard(self._hole, question, text, answer))
        return answer

    def _joined(self, *values: object) -> HeldText:
        if not all(isinstance(value, str | HeldText) for value in values):
            raise NoOutline
        joined = _concat(values)
        assert isinstance(joined, HeldText), "one of them is held"
        return joined


def _said(value: object) -> str | HeldText:
    """Return what a template writes of a value."""
    return value if isinstance(value, HeldText) else str(value)


def _concat(values: Iterable[object]) -> str | HeldText:
    said = [_said(value) for value in values]
    held = next((one for one in said if isinstance(one, HeldText)), None)
    if held is None:
        return "".join(map(str, said))
    parts: list[str | Hole] = []
    text = ""
    for one in said:
        more = one._parts if isinstance(one, HeldText) else (one,)
        text += one._text if isinstance(one, HeldText) else one
        for part in more:
            if isinstance(part, str) and parts and isinstance(last := parts[-1], str):
                parts[-1] = last + part
            elif part:
                parts.append(part)
    return HeldText(held._guards, tuple(parts), text)


class HeldCode(LiteralCode):
    """Code that writes and joins values as they are, not as `str` makes text of them."""

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            raise NoOutline
        self.write("environment.said(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2's name
        """Write code for `a ~ b`."""
        self.write("environment.concat((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class HeldEnvironment(ChatEnvironment):
    """A sandbox for held contents, without what may be another thing at another time."""

    code_generator_class = HeldCode
    concat = staticmethod(_concat)  # type: ignore[assignment]
    said = staticmethod(_said)

    def __init__(self) -> None:
        super().__init__()
        self.globals["strftime_now"] = self.globals["lipsum"] = _ends
        self.filters |= {"random": _ends, "trim": _trim, "string": _string}
        self.tests["string"] = lambda value: isinstance(value, str | HeldText)


def _trim(value: Any, chars: str | None = None) -> Any:
    return value.strip(chars) if isinstance(value, HeldText) else do_trim(value, chars)


def _string(value: Any) -> Any:
    return value if isinstance(value, HeldText) else soft_str(value)


class Tracer:
    """Makes outlines by one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        # By source. Compiled before there are chats, as that takes as long as many of them.
        self._compiled = {
            source: _compiled(source) for source in (template.source, template.tool_source)
        }

    def outline(self, chat: TemplateInput, text: str) -> Outline | None:
        """Return the outline of a conversation that was rendered to `text`; None: there is none."""
        contents = [message["content"] for message in chat.messages]
        guards: list[Guard] = []
        messages = [
            message | {"content": HeldText(guards, (Hole(index),), contents[index])}
            for index, message in enumerate(chat.messages)
        ]
        try:
            template = self._compiled[self._template.source_for(chat)]
            if template is None:
                return None
            rendered = template.render(self._template.names(chat, messages))
        except (NoOutline, Exception):  # noqa: BLE001 - the text is rendered in any case
            return None
        parts = rendered._parts if isinstance(rendered, HeldText) else (rendered,)
        outline = Outline(parts, tuple(guards))
        return outline if outline.filled(contents) == text else None


def _compiled(source: str) -> jinja2.Template | None:
    """Return a template for held contents; None: it escapes what it writes."""
    try:
        return HeldEnvironment().from_string(source)
    except NoOutline:
        return None
