"""The jinja2 environment for chat templates, as Hugging Face documents it, plus resource bounds.

Templates come with checkpoints and process client input, and neither is trusted: the sandbox keeps
templates from accessing Python internals, and a `Budget` keeps a runaway template from blocking the
process. Jinja has no unbounded loop, but loops nest: every attribute, item and call access checks
the budget.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 64 * 2**20  # of a rendered chat and of any intermediate string
_MAX_EXPONENT = 64
_T = TypeVar("_T")


class Budget:
    """The time limit of one rendering."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._end_s = time.monotonic() + limit_s

    def check(self) -> None:
        """Raise TemplateError if the time is used up."""
        if time.monotonic() > self._end_s:
            raise jinja2.TemplateError(f"rendering took longer than {self._limit_s:g} s")


current_budget: ContextVar[Budget | None] = ContextVar("current_budget", default=None)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with the globals, filters and tags that chat templates expect."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Get an attribute for a template, within bounds."""
        return _bounded(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Get an item for a template, within bounds."""
        return _bounded(super().getitem(obj, argument))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Make a template's call; as in jinja2, the odd names leave all keywords to the callee."""
        return _bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Bound the operators with which a short template can make huge values."""
        if operator == "**" and (abs(left) > MAX_CHARS or abs(right) > _MAX_EXPONENT):
            raise jinja2.TemplateError("a power in the template is too large")
        for text, count in ((left, right), (right, left)):
            is_repetition = isinstance(text, str | list | tuple) and isinstance(count, int)
            if operator == "*" and is_repetition and len(text) * count > MAX_CHARS:
                raise jinja2.TemplateError("a repetition in the template is too long")
        return super().call_binop(context, operator, left, right)


class GenerationTag(Extension):
    """Accepts `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a scope around the body, which does not change the output."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def render(template: jinja2.Template, variables: Mapping[str, Any], limit_s: float) -> str:
    """Render a template within bounds. Passes on errors of jinja2 and of the template."""
    budget = Budget(limit_s)
    token = current_budget.set(budget)
    try:
        pieces: list[str] = []
        num_chars = 0
        for piece in template.generate(**variables):
            budget.check()
            pieces.append(_bounded(piece))
            num_chars += len(piece)
            if num_chars > MAX_CHARS:
                raise jinja2.TemplateError(f"the rendered chat exceeds {MAX_CHARS} characters")
        return "".join(pieces)
    finally:
        current_budget.reset(token)


def _bounded(value: _T) -> _T:
    budget = current_budget.get()
    if budget is not None:
        budget.check()
    if isinstance(value, str) and len(value) > MAX_CHARS:
        raise jinja2.TemplateError(f"a string in the template exceeds {MAX_CHARS} characters")
    return value


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


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
