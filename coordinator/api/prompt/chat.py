"""The prompt of a chat: the rendered conversation, as tokens; so is the answer that is expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import msgspec
from msgspec import structs

from coordinator.api.prompt.earlier_calls import one_by_one, template_call, template_id
from coordinator.api.prompt.fit import FittedPrompt, check_num_chars, fitted
from coordinator.api.read.chat import ChatRequest, Message, ToolCall
from coordinator.api.read.json_text import JsonReader
from coordinator.models.model import Model
from coordinator.text import TemplateInput
from coordinator.text.parts import ToolFormat
from coordinator.text.threads import Asker
from pdserve.shared.errors import ContextLengthExceeded, InvalidRequest

MAX_ECHOED_CHARS = 1 << 20  # in all choices together: prompts may be truncated, echoes are not

_ENCODER = msgspec.msgpack.Encoder()
# The least and the most that such a model was trained with: it cannot do without.
_EFFORTS_OF_HARMONY = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_TEMPLATE_ROLES = {"developer": "system"}


async def chat_prompt(body: ChatRequest, model: Model, asker: Asker) -> FittedPrompt:
    """Return the prompt, which leaves as many tokens as are asked for. Raises RequestError."""
    max_model_len = model.max_model_len()
    most = max_model_len if body.truncate_prompt_tokens is None else None
    token_ids = await encode_chat(body, model, asker, max_tokens=most)
    return fitted(token_ids, body, body.requested_tokens, max_model_len)


async def encode_chat(
    body: ChatRequest,
    model: Model,
    asker: Asker,
    *,
    max_tokens: int | None = None,
    may_be_empty: bool = False,
) -> list[int]:
    """Return the token ids of the rendered conversation, including tools.

    More than `max_tokens` may be refused. Raises RequestError.
    """
    _check_tools(body, model)
    chat = _template_input(body, model.tool_format)
    check_num_chars(chat.num_chars, model.tokenizer, model.max_model_len(), "messages")
    token_ids = await model.tokenizer.encode_chat(chat, asker, max_tokens=max_tokens)
    if not token_ids and not may_be_empty:
        raise InvalidRequest(
            "the chat template turns 'messages' into an empty prompt; at least one token is needed",
            "messages",
        )
    return token_ids


def conversation_of(messages: Sequence[Message]) -> int:
    """Return 32 bits that all turns of a conversation have in common: of how the user begins it."""
    first = next((m for m in messages if m.role == "user"), messages[0])
    return crc32(_ENCODER.encode(first.content))


def echoed_text(request: ChatRequest) -> str:
    """Return what the answer begins with: with `echo`, the message of its own that it continues.

    Raises InvalidRequest: all choices together would repeat too much.
    """
    position = len(request.messages) - 1
    last = request.messages[position]
    if not (request.echo and request.continue_final_message and last.role == "assistant"):
        return ""
    text = _text(last, f"messages[{position}]", may_be_empty=True)
    num_chars = len(text) * (request.n or 1)
    if num_chars > MAX_ECHOED_CHARS:
        raise InvalidRequest(
            f"'echo' would repeat {num_chars} characters in all choices together; at most "
            f"{MAX_ECHOED_CHARS} are repeated",
            "echo",
        )
    return text


def _check_tools(body: ChatRequest, model: Model) -> None:
    """Check that the model supports the request's tools. Raises InvalidRequest."""
    template = model.tokenizer.chat_template
    if not body.tools or body.tool_choice == "none" or template is None:
        return
    if "tools" not in template.tool_source:
        raise InvalidRequest("this model's chat template does not support tools", "tools")
    if model.tool_format is None:
        raise InvalidRequest(
            "the server does not know the format in which this model writes tool calls; if it is "
            "one of those that pdserve knows, whoever runs it can name it with "
            "--set answers.tool_format=FORMAT",
            "tools",
        )


def _template_input(request: ChatRequest, tool_format: ToolFormat | None) -> TemplateInput:
    """Return the conversation to render with the chat template. Raises InvalidRequest."""
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true",
            "continue_final_message",
        )
    prompts = request.add_generation_prompt
    reader = JsonReader()
    messages = [
        _template_message(message, f"messages[{i}]", reader, tool_format)
        for i, message in enumerate(_with_calls_of_tools(request.messages))
    ]
    return TemplateInput(
        messages=list(one_by_one(messages)) if tool_format is ToolFormat.HARMONY else messages,
        add_generation_prompt=not continues if prompts is None else prompts,
        continue_final_message=continues,
        add_special_tokens=bool(request.add_special_tokens),
        variables=_hints(request, tool_format) | (request.chat_template_kwargs or {}),
        documents=request.documents or [],
        tools=[msgspec.to_builtins(tool) for tool in request.tools or []]
        if request.tool_choice != "none"
        else [],
    )


def _hints(request: ChatRequest, tool_format: ToolFormat | None) -> dict[str, Any]:
    """Return template variables for reasoning effort and verbosity; not all templates use them."""
    hints: dict[str, Any] = {}
    if request.verbosity is not None:
        hints["verbosity"] = request.verbosity
    if request.reasoning_effort is not None:
        thinks = request.reasoning_effort != "none"
        effort = request.reasoning_effort
        known = _EFFORTS_OF_HARMONY if tool_format is ToolFormat.HARMONY else {}
        hints["reasoning_effort"] = known.get(effort, effort)
        hints |= {"enable_thinking": thinks, "thinking": thinks}  # names differ by checkpoint
    return hints


def _with_calls_of_tools(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with deprecated function calls as tool calls. Raises InvalidRequest."""
    told: list[Message] = []
    last_id: str | None = None  # id of the last call so far
    for i, message in enumerate(messages):
        if message.function_call is not None:
            if message.role != "assistant" or message.tool_calls:
                raise InvalidRequest(
                    f"messages[{i}] has 'function_call', which is allowed only in a message of the "
                    "assistant, and not beside 'tool_calls'",
                    f"messages[{i}].function_call",
                )
            last_id = f"call{i:05d}"  # nine letters and digits, as Mistral's templates require
            call = ToolCall(id=last_id, function=message.function_call)
            message = structs.replace(message, function_call=None, tool_calls=[call])
        elif message.role == "function":
            message = structs.replace(message, role="tool", tool_call_id=last_id)
        told.append(message)
    return told


def _template_message(
    message: Message, where: str, reader: JsonReader, tool_format: ToolFormat | None
) -> dict[str, Any]:
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(
            f"{where} has 'tool_calls', which are allowed only in messages of the assistant",
            f"{where}.tool_calls",
        )
    # Chat templates do not know "developer", OpenAI's newer name of the system role.
    role = _TEMPLATE_ROLES.get(message.role, message.role)
    may_be_empty = message.role == "assistant"  # an answer that was only calls or reasoning
    values: dict[str, Any] = {"role": role, "content": _text(message, where, may_be_empty)}
    if message.name is not None:
        values["name"] = message.name
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thought is not None:  # templates read it by either name
        values |= {"reasoning_content": thought, "reasoning": thought}
        if tool_format is ToolFormat.HARMONY:
            values |= _thinking(thought, values["content"], has_calls=bool(message.tool_calls))
    if message.tool_call_id is not None:
        values["tool_call_id"] = template_id(message.tool_call_id, tool_format)
    if message.tool_calls:
        values["tool_calls"] = [
            template_call(call, reader, tool_format) for call in message.tool_calls
        ]
    return values


def _thinking(thought: str, content: str, *, has_calls: bool) -> dict[str, str]:
    """Reasoning for the templates of harmony, which take it or a content with calls, not both."""
    if not (has_calls and thought and content):
        return {"thinking": thought}
    return {"thinking": f"{thought}\n{content}", "content": ""}


def _text(message: Message, where: str, may_be_empty: bool) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.refusal is not None:
            return message.refusal
        if may_be_empty:
            return ""
        raise InvalidRequest(f"{where} needs 'content'", f"{where}.content")
    texts: list[str] = []
    for i, part in enumerate(message.content):
        param = f"{where}.content[{i}]"
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal"):
            raise InvalidRequest(
                f"{param} is of type {part.type[:128]!r}, but this server takes only 'text'", param
            )
        if text is None:
            raise InvalidRequest(f"{param} needs {part.type!r}", f"{param}.{part.type}")
        texts.append(text)
    return "\n".join(texts)


async def predicted(body: ChatRequest, model: Model, asker: Asker) -> list[int]:
    """Return the tokens of `prediction`; none if there is none. Raises RequestError.

    What a client expects to be answered makes the answer faster, and no other.
    """
    if body.prediction is None:
        return []
    content = body.prediction.content
    if not isinstance(content, str):
        for i, part in enumerate(content):
            if part.type != "text" or part.text is None:
                raise InvalidRequest(
                    f"'prediction.content[{i}]' must be a part of type 'text'", "prediction.content"
                )
        content = "".join(part.text or "" for part in content)
    most = model.max_model_len()
    check_num_chars(len(content), model.tokenizer, most, "prediction")
    (token_ids,) = await model.tokenizer.encode_texts([content], asker, add_special_tokens=False)
    if len(token_ids) > most:
        raise ContextLengthExceeded(
            f"'prediction' has {len(token_ids)} tokens, more than the {most} of this model's "
            "maximum context length: leave out what will not be answered",
            "prediction",
        )
    return token_ids
