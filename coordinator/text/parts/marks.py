"""The marks with which families of models separate tool calls from text, and how calls are read.

Hermes, Qwen 2.5 and 3: `<tool_call>{...}</tool_call>`. Qwen3-Coder: tags in the same mark. Mistral:
`[TOOL_CALLS][{...}, {...}]`, later `[TOOL_CALLS]NAME{...}`, `[TOOL_CALLS]NAME[ARGS]{...}` or
`[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}` for each. Llama 3: the whole answer is `{...}; {...}`,
optionally after `<|python_tag|>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from coordinator.text.parts.interface import CallReader, Tools
from coordinator.text.parts.json_call import JsonCall
from coordinator.text.parts.tagged_call import FUNCTION, TaggedCall

ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
_HEAD = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?(?:\[ARGS\]\s*)?")
_MAX_HEAD = 256  # characters
_IN_HEAD = re.compile(r"[\w.\[\]-]+(?:\s+[\w.\[\]-]+){0,3}\s*")  # what may become a head


@dataclass(frozen=True, slots=True)
class Head:
    """What precedes the arguments of a named call."""

    length: int  # in characters; 0: it is not whole yet
    name: str = ""
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one family."""

    begin: str = ""  # before a call or a list of calls; empty: calls only where the answer begins
    end: str = ""  # after a call or list
    optional: str = ""  # may precede the first call
    separators: str = ""  # single characters that may stand between calls
    lists: bool = False  # calls may be in a list
    names_calls: bool = False  # NAME{arguments} is allowed, too
    is_tagged: bool = False  # calls are tags, which models also write without `begin`

    @property
    def opening(self) -> str:
        """Where a call itself begins."""
        return FUNCTION if self.is_tagged else "{"

    @property
    def begins(self) -> tuple[str, ...]:
        """What to look for in text."""
        return (self.begin, self.opening) if self.is_tagged else (self.begin,) * bool(self.begin)

    @property
    def between(self) -> tuple[str, ...]:
        """The marks that may stand between calls."""
        return tuple(filter(None, (self.begin, self.end, self.optional)))

    @property
    def ends_alone(self) -> bool:
        """Whether the end mark comes after each call."""
        return bool(self.end) and not self.lists

    @property
    def _next_mark(self) -> str:
        """The mark after a call."""
        return self.end if self.ends_alone else self.begin

    def read(self, tools: Tools, head: Head | None = None) -> CallReader:
        """Return a reader of a call that begins here, or after its head."""
        if self.is_tagged:
            return TaggedCall(tools)
        if head is None:
            return JsonCall(tools, needs_arguments=not self.begin, mark=self._next_mark)
        return JsonCall(
            tools,
            needs_arguments=False,
            mark=self._next_mark,
            name=head.name,
            call_id=head.call_id,
        )

    def head_of(self, text: str) -> Head | None:
        """Return the head of a named call; None: the text does not begin with one."""
        at = text.find("{")
        if at < 0:
            return Head(0) if len(text) <= _MAX_HEAD and _IN_HEAD.fullmatch(text) else None
        found = _HEAD.fullmatch(text, 0, at)
        return None if found is None else Head(at, found[1], found[2])


HERMES = Marks(begin="<tool_call>", end="</tool_call>")
QWEN3_CODER = Marks(begin="<tool_call>", end="</tool_call>", is_tagged=True)
LLAMA3 = Marks(optional="<|python_tag|>", separators=";,}")
MISTRAL = Marks(begin="[TOOL_CALLS]", end="]", separators=",", lists=True, names_calls=True)
