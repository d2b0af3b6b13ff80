"""Reads a request body into a validated struct; errors name the parameter at fault.

Clients send every parameter they know. One that is not in the struct is accepted if it cannot
change the answer, or has a value without effect. Any other is refused by name, so that none is
silently dropped.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from aiohttp import HttpVersion11, web
from msgspec import Raw, Struct

from coordinator.api.config import ApiConfig
from coordinator.api.context import CONTEXT, TRACE
from coordinator.api.read.allowed_values import allowed_values
from coordinator.api.read.body_budget import SLOW, Body
from coordinator.api.read.chat import MAX_MESSAGES, MAX_TOOLS, Function, Message, Tool
from coordinator.api.read.json_text import JsonReader
from pdserve.shared.errors import BuffersFull, InvalidRequest

_PART_CHARS = 500  # kept at each end of a long error message
_CONTINUE = "100-continue"
_T = TypeVar("_T", bound=msgspec.Struct)
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_VALUE = re.compile(r"Invalid (?:enum )?value (?P<value>.*)", re.DOTALL)
_FIELD = re.compile(r"(?:missing required|contains unknown) field `(?P<name>[^`]*)`")


async def expect_nothing(request: web.Request) -> None:
    """Route handler for `Expect`: does nothing; `_read_body` sends the 100 Continue."""


async def read_request(request: web.Request, schema: type[_T], config: ApiConfig) -> _T:
    """Read and decode a JSON body. Raises InvalidRequest or an aiohttp HTTP error."""
    return convert_request(await read_object(request, config), schema)


async def read_object(request: web.Request, config: ApiConfig) -> dict[str, Any]:
    """Read a body that must be a JSON object. Raises InvalidRequest or an aiohttp HTTP error."""
    trace = request[TRACE]
    text, held = await _read_text(request, config)
    if trace.keyed is not None:
        await request.app[CONTEXT].known_keys.begin(trace.keyed)
        trace.unique = trace.keyed.unique
    values = await JsonReader().read_long(text, "the request body", held)
    if not isinstance(values, dict):
        raise InvalidRequest("the request body must be a JSON object")
    return values


async def read_parts(request: web.Request, config: ApiConfig) -> dict[str, Raw]:
    """Read a JSON object whose members stay text. Raises as `read_object`."""
    text, held = await _read_text(request, config)
    return await JsonReader().read_parts(text, "the request body", held)


async def _read_text(request: web.Request, config: ApiConfig) -> tuple[bytes, Body]:
    _check_head(request, config)
    trace, bodies = request[TRACE], request.app[CONTEXT].bodies
    trace.body = held = bodies.body(trace.payer)
    return await _read_body(request, config, held), held


def convert_parts(parts: dict[str, Raw], schema: type[_T]) -> _T:
    """Decode members that are text to `schema`. Raises InvalidRequest, which names the parameter.

    Only members that `schema` does not have become values before: they may have no effect.
    """
    reader, served = JsonReader(), field_names(schema)
    others = parts.keys() - served
    values = {name: reader.read(bytes(parts[name]), repr(name), name) for name in others}
    check_parameters(values, schema)
    text = msgspec.json.encode({name: parts[name] for name in parts.keys() & served})
    try:
        return msgspec.json.decode(text, type=schema)
    except msgspec.ValidationError as error:
        raise _at_parameter(str(error), schema) from error


def convert_request(values: dict[str, Any], schema: type[_T]) -> _T:
    """Convert a body's fields to `schema`. Raises InvalidRequest, which names the parameter."""
    check_parameters(values, schema)
    try:
        return msgspec.convert(values, schema)
    except msgspec.ValidationError as error:
        raise _at_parameter(str(error), schema) from error


def _check_head(request: web.Request, config: ApiConfig) -> None:
    """Check the headers, to refuse a body before it is sent. Raises an aiohttp HTTP error.

    Only a body that claims to be JSON makes a browser ask first whether its page may send it
    (`headers.preflight`), so a browser has to claim that.
    """
    given = request.headers.get("Content-Type", "application/octet-stream")
    kind = given.partition(";")[0].strip().lower()  # request.content_type would keep all parts
    is_json = kind == "application/json" or kind.endswith("+json")
    if not is_json and "Content-Type" in request.headers:
        raise web.HTTPUnsupportedMediaType(
            text=f"the request body must be application/json, not {kind}"
        )
    if not is_json and "Origin" in request.headers:
        raise web.HTTPUnsupportedMediaType(
            text="a web page must say that the request body is application/json, but the request "
            "has no Content-Type"
        )
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in ("identity", ""):
        raise web.HTTPUnsupportedMediaType(
            text=f"the request body must not be compressed, but has encoding {encoding[:64]!r}"
        )
    expected = request.headers.get("Expect", _CONTINUE)
    if expected.lower() != _CONTINUE:
        raise web.HTTPExpectationFailed(
            text=f"'Expect' is {expected[:64]!r}, but must be '100-continue'"
        )
    size = request.content_length
    if size is not None and size > config.max_body_bytes:
        raise web.HTTPRequestEntityTooLarge(config.max_body_bytes, size)


async def _read_body(request: web.Request, config: ApiConfig, held: Body) -> bytes:
    """Return the whole body; each part is counted before the next one is read."""
    if "Expect" in request.headers and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the interim response is no part of the answer
    content, parts, keyed = request.content, list[bytes](), request[TRACE].keyed

    async def take(part: bytes) -> None:
        parts.append(part)
        if (num_bytes := held.num_bytes + len(part)) > config.max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(config.max_body_bytes, num_bytes)
        await held.take(len(part))
        if keyed is not None:
            keyed.add(part)

    try:
        if content.is_eof():  # it came with the head
            await take(content.read_nowait(-1))
        else:
            async with asyncio.timeout(config.body_timeout_s) as timer:
                held.may_end(lambda: timer.reschedule(0.0))
                while part := await content.readany():
                    await take(part)
    except TimeoutError as error:
        if held.was_ended:
            raise BuffersFull(SLOW) from error
        raise web.HTTPRequestTimeout(
            text=f"the request body did not arrive within {config.body_timeout_s:g} s"
        ) from error
    except web.RequestPayloadError as error:
        what = " ".join(str(error).split())
        raise InvalidRequest(f"the request body cannot be read: {what}") from error
    finally:
        held.arrived()
    return b"".join(parts)


def _at_parameter(message: str, schema: type[msgspec.Struct]) -> InvalidRequest:
    """Build an error that names the parameter, from the decoder's message.

    The message says `what` is wrong and, unless that is the top level, at which `path`.
    """
    if len(message) > 2 * _PART_CHARS:  # it may quote the client's input
        message = f"{message[:_PART_CHARS]} ... {message[-_PART_CHARS:]}"
    match = _PLACE.match(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    if field := _FIELD.search(what):
        path = f"{path}.{field['name']}" if path else field["name"]
    value = _VALUE.fullmatch(what)
    if value and (allowed := allowed_values(schema, path)):
        one_of = "one of " if len(allowed) > 1 else ""
        what = f"must be {one_of}{', '.join(map(repr, allowed))}, not {value['value']}"
    path = path.replace("[...]", "")
    if not path:
        return InvalidRequest(what)
    return InvalidRequest(f"invalid {path!r}: {what[:1].lower()}{what[1:]}", path)


def field_names(schema: type[Struct]) -> frozenset[str]:
    """Return the JSON names of a request's fields."""
    return frozenset(schema.__struct_encode_fields__)


# Accepted with any value: these concern accounts, names, storage and speed.
IGNORED = frozenset(
    {
        "client_metadata",
        "max_tool_calls",  # limits built-in tools, and there are none
        "metadata",
        "prediction",  # only affects speed; of chats it is used
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "session_id",  # the prefix cache recognises a conversation by its prefix
        "store",  # of chats, which are not kept; /v1/responses keeps responses
        "stream_interval",  # the load decides how many tokens go into an event
        "user",
    }
)

# Known but not supported: accepted only with these values (or null).
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": ([],),
    "allowed_token_ids": ([],),
    "audio": (),
    "background": (False,),
    "background_options": ({},),
    "bad_words": ([],),
    "best_of": (1,),  # in chat requests
    "chat_template": (),
    "chat_template_kwargs": ({},),  # in completion requests
    "context_management": ([],),
    "conversation": (),
    "custom_logit_processor": (),
    "ec_transfer_params": (),
    "echo": (False,),
    "extra_key": (),
    "image": (),
    "input_ids": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0, 1),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prompt": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_routed_experts": (False,),
    "return_token_offsets": (False,),
    "spaces_between_special_tokens": (True, False),  # no spaces are added in any case
    "stop_regex": (),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}


def check_parameters(body: dict[str, Any], schema: type[Struct]) -> None:
    """Refuse parameters that `schema` does not have, unless they have no effect.

    Raises InvalidRequest.
    """
    served = field_names(schema)
    for name, value in body.items():
        if name in served or name in IGNORED or value is None:
            continue
        if name not in NEUTRAL:
            raise InvalidRequest(f"unrecognized parameter: {name[:128]!r}", name[:128])
        if not any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL[name]):
            raise InvalidRequest(_unsupported(name), name)
    if "tools" in served:
        check_tool_keys(body)
    messages = body.get("messages")
    if "messages" in served and isinstance(messages, list):
        for i, message in enumerate(messages[:MAX_MESSAGES]):  # decoding refuses more
            if isinstance(message, dict):
                _check_message(message, f"messages[{i}]")


def _unsupported(name: str) -> str:
    values = " or ".join(repr(value) for value in NEUTRAL[name])
    return f"{name!r} is not supported" + (f" other than as {values}" if values else "")


_MESSAGE_FIELDS = field_names(Message)
_MESSAGE_NOT_SERVED = frozenset({"audio"})
_MESSAGE_IGNORED = frozenset(  # fields of answers, also of gateways', that clients send back
    {
        "annotations",
        "parsed",
        "provider_specific_fields",
        "reasoning_details",
        "thinking_blocks",
    }
)


def _check_message(message: dict[str, Any], where: str) -> None:
    for name, value in message.items():
        if name in _MESSAGE_FIELDS or name in _MESSAGE_IGNORED or value in (None, []):
            continue
        known, name = name in _MESSAGE_NOT_SERVED, name[:128]
        problem = f"{name!r} is not supported" if known else f"unrecognized parameter: {name!r}"
        raise InvalidRequest(f"{problem} in {where}", f"{where}.{name}")


_FUNCTION = field_names(Function)
_TOOL = field_names(Tool)
_FLAT_TOOL = _FUNCTION | {"type"}  # in the Responses API
# Hints to other servers, and descriptions that no template shows.
_IGNORED = frozenset(
    (
        *("allowed_callers", "annotations", "cache_control", "defer_loading"),
        *("eager_input_streaming", "input_examples", "output_schema", "return", "title"),
    )
)


def check_tool_keys(body: dict[str, Any]) -> None:
    """Check the tools of a call, in either API, and functions. Raises InvalidRequest."""
    for name in ("tools", "functions"):
        given = body.get(name)
        for i, tool in enumerate(given[:MAX_TOOLS] if isinstance(given, list) else ()):
            where = f"{name}[{i}]"
            if name == "functions":
                _check(tool, _FUNCTION, where)
            elif isinstance(tool, dict) and tool.get("type") == "function":
                _check(tool, _TOOL if "function" in tool else _FLAT_TOOL, where)
                _check(tool.get("function"), _FUNCTION, f"{where}.function")


def _check(value: Any, known: frozenset[str], where: str) -> None:
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key not in known and key not in _IGNORED and inner is not None:
            key = key[:128]
            raise InvalidRequest(
                f"unrecognized parameter: {key!r} in {where}; known are {', '.join(sorted(known))}",
                f"{where}.{key}",
            )
