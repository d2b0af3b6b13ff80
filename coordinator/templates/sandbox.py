"""The jinja2 environment for chat templates, as Hugging Face documents it.

The sandbox keeps templates from Python's internals, and from changing what they are given. It does
not bound what they take: that is done by the process in which they run (`chat_template.py`).
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class LiteralCode(CodeGenerator):
    """Computes nothing ahead: templates are compiled in processes that have no limits, too."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with the globals, filters and tags that chat templates expect."""

    code_generator_class = LiteralCode

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationTag],
            optimized=False,
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now


class GenerationTag(Extension):
    """Accepts `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a scope around the body, which does not change the output."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Refusal(jinja2.TemplateError):
    """A template's own error."""


def is_refusal(error: Exception) -> bool:
    """Whether a template refuses a conversation, and has not failed."""
    return isinstance(error, _Refusal)


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as plain JSON: jinja2's own tojson escapes for HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
