"""What of a call is sent to a server elsewhere: what OpenAI describes, and nothing of ours.

A parameter that is not known there, and would change the answer, is refused by name.
"""

from __future__ import annotations

from typing import Any, Final

from coordinator.api.read.body import IGNORED
from pdserve.shared.errors import InvalidRequest

_BOTH: Final = frozenset(
    (
        *("n", "stream", "max_tokens", "temperature", "top_p", "presence_penalty"),
        *("frequency_penalty", "seed", "stop", "response_format"),
    )
)
_SENT: Final = {
    "/chat/completions": _BOTH
    | frozenset(
        (
            *("messages", "max_completion_tokens", "logprobs", "top_logprobs", "prediction"),
            *("reasoning_effort", "verbosity", "tools", "tool_choice", "parallel_tool_calls"),
            *("functions", "function_call"),
        )
    ),
    "/completions": _BOTH | frozenset(("prompt", "logprobs", "echo", "best_of", "suffix")),
}
# Of this cluster: they say how it serves a call, and not what the answer is.
_OURS: Final = frozenset(
    ("model", "stream_options", "service_tier", "cache_salt", "slo_class", "priority")
)
PATHS: Final = frozenset(_SENT)


def sent_body(values: dict[str, Any], path: str, tier: str) -> dict[str, Any]:
    """Return the body to send, for one of `PATHS`. Raises InvalidRequest: some of it cannot be."""
    known = _SENT[path]
    body = {name: value for name, value in values.items() if value is not None and name in known}
    for name, value in values.items():
        if value not in (None, False, [], {}) and name not in known | _OURS | IGNORED:
            raise InvalidRequest(
                f"{name!r} is not understood by {tier!r}, the tier elsewhere that may answer: "
                "leave it out, or name another tier",
                name,
            )
    prompt = body.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(one, str) for one in prompt):
        raise InvalidRequest(
            f"{tier!r} has a tokenizer of its own: send 'prompt' as text", "prompt"
        )
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}  # for the bill
    return body
