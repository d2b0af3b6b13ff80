"""A checkpoint's chat template: a conversation as the text that the model was trained to continue.

Chat templates are not trusted. They come with checkpoints, and process what clients send. Most of
what a template can do takes a short program a long time, or much memory, in a single operation that
nothing in its process can interrupt. So clients' conversations are rendered in processes of their
own (`child.py`), for which `coordinator/text/renderers.py` looks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jinja2
import msgspec

from coordinator.templates.sandbox import ChatEnvironment, is_refusal
from pdserve.shared.errors import InvalidRequest, TokenizerError

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_FINAL_MESSAGE_END = "\ue000final message ends here\ue001"  # from a private use area
# Errors that expressions in a template may raise on unexpected values.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class TemplateInput(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a chat template."""

    messages: Sequence[dict[str, Any]]  # never empty; every "content" is a string
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the prompt ends inside the last message
    add_special_tokens: bool = False  # templates write their own BOS
    variables: Mapping[str, Any] = {}  # further template variables
    tools: Sequence[dict[str, Any]] = ()  # that the model may call
    documents: Sequence[dict[str, Any]] = ()  # that it may answer from

    @property
    def num_chars(self) -> int:
        """Characters in the messages' contents, which every template puts into the prompt."""
        return sum(len(message["content"]) for message in self.messages)

    def is_longer_than(self, num_chars: int) -> bool:
        """Return roughly whether all that may be put into the prompt is longer than this."""
        if self.num_chars > num_chars:
            return True
        return len(msgspec.json.encode(self._contents)) > num_chars

    @property
    def _contents(self) -> tuple[object, ...]:
        return self.messages, self.tools, self.documents, self.variables


class ChatTemplate:
    """A checkpoint's chat template, compiled; it may have another one for chats with tools."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
    ) -> None:
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        self.special_tokens = dict(special_tokens or {})
        self._template = _compiled(self.source)
        self._tool_template = _compiled(self.tool_source)

    def render(self, conversation: TemplateInput) -> str:
        """Return the text of the prompt, however long that takes.

        Raises InvalidRequest, with the template's own message if it refuses the conversation.
        """
        if reserved := _RESERVED & set(conversation.variables):
            raise InvalidRequest(
                f"chat_template_kwargs cannot set {min(reserved)!r}", "chat_template_kwargs"
            )
        if conversation.documents and "documents" not in self.source_for(conversation):
            raise InvalidRequest(
                "this model's chat template does not support documents", "documents"
            )
        messages = list(conversation.messages)
        if not conversation.continue_final_message:
            return self._render(conversation, messages)
        final = messages[-1]
        messages[-1] = final | {"content": final["content"] + _FINAL_MESSAGE_END}
        text = self._render(conversation, messages)
        end = text.rfind(_FINAL_MESSAGE_END)
        if end < 0:
            raise InvalidRequest(
                "the chat template leaves out the final message, so it cannot be continued",
                "continue_final_message",
            )
        return text[:end]

    def source_for(self, conversation: TemplateInput) -> str:
        """Return the template that renders a conversation."""
        return self.tool_source if conversation.tools else self.source

    def names(
        self, conversation: TemplateInput, messages: list[dict[str, Any]]
    ) -> dict[str, object]:
        """Return all names that a template gets, with these messages."""
        return {
            **self.special_tokens,
            **conversation.variables,
            "messages": messages,
            "tools": list(conversation.tools) or None,
            "documents": list(conversation.documents) or None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }

    def _render(self, conversation: TemplateInput, messages: list[dict[str, Any]]) -> str:
        template = self._tool_template if conversation.tools else self._template
        try:
            return template.render(self.names(conversation, messages))
        except _TEMPLATE_ERRORS as error:
            for other_form in () if is_refusal(error) else (_in_parts, _with_arguments_as_text):
                with suppress(*_TEMPLATE_ERRORS):
                    return template.render(self.names(conversation, [*map(other_form, messages)]))
            what = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template failed: {what}", "messages") from error


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its text as a list of parts, as Gemma 3's first templates read it."""
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its calls' arguments as JSON text, as DeepSeek's templates read it."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": text}})
    return message | {"tool_calls": calls}


def _compiled(source: str) -> jinja2.Template:
    try:
        return ChatEnvironment().from_string(source)
    except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
        raise TokenizerError(f"the chat template cannot be compiled: {error}") from error
