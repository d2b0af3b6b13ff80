"""Plans how an answer's text is split into content, reasoning and tool calls, and its grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.api.config import ApiConfig
from coordinator.api.plan.grammar import chat_grammar
from coordinator.api.read.chat import ChatRequest
from coordinator.api.read.terms import ServiceTerms
from coordinator.models.model import Model
from coordinator.text import Tokenizer
from coordinator.text.grammars import Thinking
from coordinator.text.parts import AnswerParts, CallPiece, ToolFormat
from coordinator.text.parts.call_ids import mistral_id
from coordinator.text.parts.reasoning import BEGIN, END, ContentStart, Reasoning

_LAST_TOKENS = 8  # tokens at a prompt's end that are searched for the reasoning mark
_WRITTEN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # by the model


@dataclass(frozen=True, slots=True)
class PartsPlan:
    """How the answers of one call are split into parts."""

    make: Callable[[], AnswerParts]  # makes the parser of one choice
    content_start: Callable[[], ContentStart | None]  # tells where a choice's content begins
    make_id: Callable[[int, CallPiece], str]  # (choice, first piece of a call) |-> the call's id
    kept_ids: frozenset[int]  # special tokens that mark tool calls
    grammar: str  # that the parts must match, for SamplingParams.grammar; "": any text
    shows_reasoning: bool  # apart from the content
    shows_function_call: bool = False  # not tool calls: the request used the deprecated parameters


async def plan_parts(
    body: ChatRequest, prompt: Sequence[int], model: Model, config: ApiConfig, terms: ServiceTerms
) -> PartsPlan:
    """Return the parts plan of a call with this rendered prompt. Raises InvalidRequest."""
    tokenizer, splits_reasoning = model.tokenizer, config.splits_reasoning
    tool_format = model.tool_format if body.tools and body.tool_choice != "none" else None
    max_calls = 1 if body.parallel_tool_calls is False else None
    is_call = tool_format is not None and body.must_call
    has_begun = splits_reasoning and _ends_with_mark(prompt, tokenizer)

    is_apart = splits_reasoning and body.separate_reasoning is not False
    is_shown = body.include_reasoning is not False
    is_streamed = body.stream_reasoning is not False

    offered = {
        tool.function.name: tool.function.parameters or {}
        for tool in body.tools or []
        if body.may_call(tool)
    }

    def make() -> AnswerParts:
        begins = tool_format.begins if tool_format is not None else ()
        reasoning = Reasoning(has_begun, is_shown, is_streamed, begins) if is_apart else None
        tools = tool_format.parser(offered) if tool_format is not None else None
        return AnswerParts(reasoning, tools, max_calls, is_call)

    def content_start() -> ContentStart | None:
        return ContentStart(Reasoning(has_begun)) if is_apart else None

    taken: dict[tuple[int, str], int] = {}  # choice and id |-> the first call that has it

    def make_id(choice: int, call: CallPiece) -> str:
        drawn = terms.draw("call", choice, call.index)
        if tool_format is not ToolFormat.MISTRAL:
            return _id(drawn)
        written = call.call_id or ""
        is_good = _WRITTEN_ID.fullmatch(written) is not None
        if is_good and taken.setdefault((choice, written), call.index) == call.index:
            return written
        return mistral_id(drawn)

    thinking = None
    if splits_reasoning and not body.continue_final_message:
        thinking = Thinking(has_begun, tokenizer.token_id(BEGIN), tokenizer.token_id(END))
    marks = tool_format.marks if tool_format is not None else ()
    kept = (tokenizer.special_id(mark) for mark in marks)
    return PartsPlan(
        make,
        content_start,
        make_id,
        frozenset(i for i in kept if i is not None),
        await chat_grammar(body, tool_format, thinking, model, terms.slo.tenant),
        shows_reasoning=is_apart and is_shown,
        shows_function_call=bool(body.functions),
    )


def _ends_with_mark(token_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    end = tokenizer.decode(token_ids[-_LAST_TOKENS:], skip_special_tokens=False)
    return end.rstrip().endswith(BEGIN)


def _id(drawn: int) -> str:
    return f"call_{drawn % 2**96:024x}"
