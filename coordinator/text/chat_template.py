"""Renders a conversation as the text that the model was trained to continue.

A process of its own renders, since chat templates are not trusted. They come with checkpoints, and
process what clients send. Most of what a template can do takes a short program a long time, or much
memory, in a single operation that nothing in its process can interrupt. To ask the process takes
less of the event loop than to render there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import msgspec

from coordinator.text.limited_process import LimitedProcess
from coordinator.text.sandbox import ChatEnvironment
from coordinator.text.threads import WAIT_S, Asker
from pdserve.shared.errors import DeadlineExceeded, InvalidRequest, Overloaded, TokenizerError
from pdserve.shared.fair_share import Turns

RENDER_CPU_S = 2.0  # usually less than a millisecond
MAX_MEMORY_BYTES = 1 << 30  # of address space
_MAX_ANSWER_BYTES = 128 << 20
_BEGIN_S = 60.0  # to import it, on a busy machine


class Beginning(msgspec.Struct, frozen=True):
    """The first input line. It is answered with an empty `Rendered`; then come conversations."""

    source: str
    tool_source: str
    special_tokens: dict[str, str]
    cpu_s: float  # CPU time limit per conversation, after which the process is killed
    max_memory_bytes: int


class Rendered(msgspec.Struct, frozen=True):
    """A rendered conversation, or why it cannot be rendered."""

    text: str = ""
    fault: str = ""
    param: str | None = None


class TemplateProcess:
    """The process for one template. It renders one conversation at a time; tenants take turns."""

    def __init__(self, template: ChatTemplate, cpu_s: float = RENDER_CPU_S) -> None:
        self._beginning = Beginning(
            template.source,
            template.tool_source,
            template.special_tokens,
            cpu_s,
            MAX_MEMORY_BYTES,
        )
        self._process = LimitedProcess(
            "coordinator.text.template_child", "renders chats", _MAX_ANSWER_BYTES
        )
        self._turns = Turns()

    @property
    def pid(self) -> int | None:
        """The process's id; None if it is not running."""
        return self._process.pid

    async def render(self, conversation: bytes, asker: Asker) -> bytes:
        """Render an `encoded` conversation, in a turn of the asker's; `text_of` its answer.

        Raises:
            InvalidRequest: it took too much time or memory.
            DeadlineExceeded: the asker's deadline passed.
            Overloaded: there was no turn or no answer in time.
        """
        left_s = asker.until_s - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, min(left_s, WAIT_S))):
                await self._turns.take(asker.payer)
                rendering = asyncio.create_task(self._render(conversation))
                rendering.add_done_callback(self._over)
                return await asyncio.shield(rendering)  # whoever leaves costs others no new start
        except TimeoutError:
            if left_s < WAIT_S:
                raise DeadlineExceeded(
                    "the request's time-out passed before its messages were rendered"
                ) from None
            raise Overloaded("too many chats wait to be rendered; try again later") from None

    async def begin(self) -> None:
        """Start the process, before there are requests. Raises Overloaded if that is impossible."""
        async with self._turns.of(""):
            await self._start_if_needed()

    async def close(self) -> None:
        """End the process if it is running."""
        await self._process.end()

    # ---- parts ---------------------------------------------------------------------------------

    async def _render(self, conversation: bytes) -> bytes:
        await self._start_if_needed()
        answer = await self._process.ask(conversation, WAIT_S)
        if not answer:
            raise InvalidRequest(
                "the chat template takes more than "
                f"{self._beginning.cpu_s:g} s to render these messages, or too much memory",
                "messages",
            )
        return answer

    async def _start_if_needed(self) -> None:
        if self._process.is_running:
            return
        await self._process.start()
        if not await self._process.ask(msgspec.json.encode(self._beginning), _BEGIN_S):
            raise Overloaded("the process that renders chats ended before it was ready")

    def _over(self, rendering: asyncio.Task[bytes]) -> None:
        if not rendering.cancelled():
            rendering.exception()  # seen, if its caller has gone
        self._turns.pass_on()


def encoded(conversation: TemplateInput) -> bytes:
    """Return a conversation as `TemplateProcess.render` takes it."""
    return msgspec.json.encode(conversation)


def text_of(answer: bytes) -> str:
    """Return the text of an answer. Raises InvalidRequest, as ChatTemplate.render."""
    rendered = msgspec.json.decode(answer, type=Rendered)
    if rendered.fault:
        raise InvalidRequest(rendered.fault, rendered.param)
    return rendered.text


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInput:
    """The input of a chat template."""

    messages: Sequence[dict[str, Any]]  # never empty; every "content" is a string
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the prompt ends inside the last message
    add_special_tokens: bool = False  # templates write their own BOS
    variables: Mapping[str, Any] = field(default_factory=dict)  # further template variables
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
        """Return the text of the prompt, however long that takes (see `TemplateProcess`).

        Raises InvalidRequest, with the template's own message if it refuses the conversation.
        """
        if reserved := _RESERVED & set(conversation.variables):
            raise InvalidRequest(
                f"chat_template_kwargs cannot set {min(reserved)!r}", "chat_template_kwargs"
            )
        source = self.tool_source if conversation.tools else self.source
        if conversation.documents and "documents" not in source:
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

    def _render(self, conversation: TemplateInput, messages: list[dict[str, Any]]) -> str:
        names = {
            **self.special_tokens,
            **conversation.variables,
            "messages": messages,
            "tools": list(conversation.tools) or None,
            "documents": list(conversation.documents) or None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        template = self._tool_template if conversation.tools else self._template
        try:
            return template.render(names)
        except _TEMPLATE_ERRORS as error:
            what = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template failed: {what}", "messages") from error


def _compiled(source: str) -> jinja2.Template:
    try:
        return ChatEnvironment().from_string(source)
    except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
        raise TokenizerError(f"the chat template cannot be compiled: {error}") from error
