"""Handling of parameters that are not in the request structs: ignored, neutral, or refused.

Clients send every parameter they know. A parameter that cannot change the answer is accepted, and
so is one that is set to a value without effect; any other is refused by name, so that no parameter
is silently dropped.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from coordinator.api.read.chat import MAX_MESSAGES, MAX_TOOLS, Function, Message, Tool
from coordinator.api.read.fields import field_names
from pdserve.shared.errors import InvalidRequest

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
