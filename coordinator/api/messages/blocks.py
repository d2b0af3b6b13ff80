"""Makes chat messages of the messages of a request.

A chat message of the assistant has reasoning, text and calls, and each result of a call is a
message of its own. Consecutive messages of one role become one, as the protocol has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from coordinator.api.messages.requests import BlockSource, GivenBlock, GivenMessage
from coordinator.api.messages.signatures import thought_of
from coordinator.api.read.chat import CalledFunction, ContentPart, Message, ToolCall
from pdserve.shared.errors import InvalidRequest

# Some agents begin the system prompt with such a block. It is meant for a gateway, differs from
# call to call, and would let no prefix be found again.
_BILLING = "x-anthropic-billing-header:"


def chat_messages(
    system: str | Sequence[GivenBlock] | None, messages: Sequence[GivenMessage]
) -> list[Message]:
    """Return the chat messages. Raises InvalidRequest."""
    chat = _Chat()
    if system is not None:
        chat.tell("system", _listed(system), "system")
    for i, message in enumerate(messages):
        where = f"messages[{i}].content"
        blocks = _listed(message.content)
        if not blocks and message.role != "assistant":
            raise InvalidRequest(f"{where} must have at least one block", where)
        if message.role == "assistant":
            chat.say(blocks, where)
        else:
            chat.tell(message.role, blocks, where)
    if not chat.messages:
        raise InvalidRequest("'messages' must have a message for the model", "messages")
    return chat.messages


class _Chat:
    """The chat messages so far."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._called: set[str] = set()

    def tell(self, role: str, blocks: Sequence[GivenBlock], where: str) -> None:
        """Add what the model is told: text, documents and results of calls."""
        for i, block in enumerate(blocks):
            at = f"{where}[{i}]"
            if block.type == "tool_result" and role == "user":
                self._add_result(block, at)
            elif not (role == "system" and (block.text or "").startswith(_BILLING)):
                self._parts_of(role).append(ContentPart(type="text", text=_text(block, at)))

    def say(self, blocks: Sequence[GivenBlock], where: str) -> None:
        """Add what the model has said: thinking, text and calls."""
        parts = self._parts_of("assistant")
        message = self.messages[-1]
        for i, block in enumerate(blocks):
            at = f"{where}[{i}]"
            match block.type:
                case "thinking":
                    thought = thought_of(block.thinking or "", block.signature or "")
                    message.reasoning_content = (message.reasoning_content or "") + thought
                case "redacted_thinking":  # another server's: nobody here can read it
                    continue
                case "tool_use":
                    message.tool_calls = [*(message.tool_calls or []), self._call(block, at)]
                case _:
                    parts.append(ContentPart(type="text", text=_text(block, at)))

    def _parts_of(self, role: str) -> list[ContentPart]:
        """Return the parts of the last message, after adding one unless it has this role."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != role:
            last = msgspec.convert({"role": role, "content": []}, Message)
            self.messages.append(last)
        assert isinstance(last.content, list)
        return last.content

    def _call(self, block: GivenBlock, where: str) -> ToolCall:
        for name in ("id", "name", "input"):
            if getattr(block, name) is None:
                raise InvalidRequest(f"{where} needs {name!r}", f"{where}.{name}")
        self._called.add(block.id or "")
        arguments = msgspec.json.encode(block.input).decode()
        return ToolCall(
            id=block.id, function=CalledFunction(name=block.name or "", arguments=arguments)
        )

    def _add_result(self, block: GivenBlock, where: str) -> None:
        if block.tool_use_id not in self._called:
            raise InvalidRequest(
                f"{where} is the result of {(block.tool_use_id or '')[:128]!r}, but no earlier "
                "'tool_use' has that 'id'",
                f"{where}.tool_use_id",
            )
        blocks = _listed(block.content or "")
        texts = [_text(one, f"{where}.content[{i}]") for i, one in enumerate(blocks)]
        text = "\n".join(texts)
        if block.is_error:  # templates have no other place for it
            text = f"Error: {text}"
        self.messages.append(Message(role="tool", content=text, tool_call_id=block.tool_use_id))


def _listed(content: str | Sequence[GivenBlock]) -> Sequence[GivenBlock]:
    return [GivenBlock(type="text", text=content)] if isinstance(content, str) else content


def _text(block: GivenBlock, where: str) -> str:
    """Return the text of a block that is text, or can be read as such. Raises InvalidRequest."""
    match block.type:
        case "text":
            if block.text is None:
                raise InvalidRequest(f"{where} needs 'text'", f"{where}.text")
            return block.text
        case "document":
            return _document(block, where)
        case "search_result":
            source = block.source if isinstance(block.source, str) else None
            return _headed((block.title, source), _joined(block.content, f"{where}.content"))
    raise InvalidRequest(
        f"{where} is of type {block.type[:128]!r}, but this server takes only text, documents of "
        "text, and in their places 'thinking', 'tool_use' and 'tool_result'",
        f"{where}.type",
    )


def _document(block: GivenBlock, where: str) -> str:
    if isinstance(block.citations, dict) and block.citations.get("enabled"):
        raise InvalidRequest(
            f"{where} asks for citations, which this server cannot give", f"{where}.citations"
        )
    source = block.source
    if not isinstance(source, BlockSource) or source.type not in ("text", "content"):
        kind = source.type if isinstance(source, BlockSource) else None
        raise InvalidRequest(
            f"{where} has a 'source' of type {str(kind)[:128]!r}, but this server takes only "
            "'text' and 'content'",
            f"{where}.source",
        )
    text = source.data if source.type == "text" else _joined(source.content, f"{where}.source")
    if text is None:
        raise InvalidRequest(f"{where}.source needs 'data'", f"{where}.source.data")
    return _headed((block.title, block.context), text)


def _joined(content: str | Sequence[GivenBlock] | None, where: str) -> str:
    if content is None:
        raise InvalidRequest(f"{where} needs 'content'", f"{where}.content")
    return "\n".join(_text(one, f"{where}[{i}]") for i, one in enumerate(_listed(content)))


def _headed(heads: Iterable[str | None], text: str) -> str:
    """Return a text below what is said about it."""
    return "\n".join([*(head for head in heads if head), text])
