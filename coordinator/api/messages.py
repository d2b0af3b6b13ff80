"""Chat messages as clients send them to messages as chat templates take them."""

from __future__ import annotations

from typing import Any

from coordinator.api.requests import ChatRequest, Message
from coordinator.text import Conversation
from pdserve.errors import InvalidRequest

_TOOL_ROLES = frozenset({"tool", "function"})


def conversation(request: ChatRequest) -> Conversation:
    """What the chat template is rendered with. Raises InvalidRequest."""
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' exclude each other",
            "continue_final_message",
        )
    prompts = request.add_generation_prompt
    return Conversation(
        messages=[
            _template_message(message, f"messages[{i}]")
            for i, message in enumerate(request.messages)
        ],
        add_generation_prompt=not continues if prompts is None else prompts,
        continue_final_message=continues,
        add_special_tokens=bool(request.add_special_tokens),
        variables=request.chat_template_kwargs or {},
    )


def _template_message(message: Message, where: str) -> dict[str, Any]:
    if message.role in _TOOL_ROLES:
        raise InvalidRequest(
            f"{where} has role {message.role!r}, but tool calling is not supported",
            f"{where}.role",
        )
    # Checkpoints' templates do not know OpenAI's newer name of the system role.
    role = "system" if message.role == "developer" else message.role
    values: dict[str, Any] = {"role": role, "content": _text(message, where)}
    if message.name is not None:
        values["name"] = message.name
    if message.reasoning_content is not None:
        values["reasoning_content"] = message.reasoning_content
    return values


def _text(message: Message, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        raise InvalidRequest(f"{where} has no content", f"{where}.content")
    texts: list[str] = []
    for i, part in enumerate(message.content):
        param = f"{where}.content[{i}]"
        if part.type != "text":
            raise InvalidRequest(
                f"{param} is of type {part.type!r}, but this server takes only 'text'", param
            )
        if part.text is None:
            raise InvalidRequest(f"{param} has no text", f"{param}.text")
        texts.append(part.text)
    return "\n".join(texts)
