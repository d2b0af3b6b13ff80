"""Requests inside a node, for all tests that need one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from pdserve.engine.prompt_results.work import PromptWork
from pdserve.engine.request import Request
from pdserve.lifecycle import Lifecycle
from pdserve.protocol import Prompt, SamplingParams

_ids = itertools.count()
_SAMPLING = frozenset(SamplingParams.__struct_fields__)


def make_request(
    prompt: Sequence[int] | int, output: Sequence[int] = (), salt: str = "", **fields: Any
) -> Request:
    """A greedy request for four tokens, with a prompt of these tokens, or of this many.

    `fields` are those of its sampling parameters (`grammar` is a text), its own, `is_long`,
    `adapter` or `adapted_from`.
    """
    is_long, adapter = fields.pop("is_long", False), fields.pop("adapter", "")
    adapted_from = fields.pop("adapted_from", 0)
    sampling = {name: fields.pop(name) for name in list(fields) if name in _SAMPLING}
    token_ids = range(100, 100 + prompt) if isinstance(prompt, int) else prompt
    made: dict[str, Any] = {
        "request_id": f"r{next(_ids)}",
        "prompt": Prompt(list(token_ids), salt, is_long, adapter, adapted_from),
        "sampling": SamplingParams(**{"max_tokens": 4, "temperature": 0.0} | sampling),
        "lifecycle": Lifecycle(received_s=0.0),
        "output_token_ids": list(output),
    }
    return Request(**made | fields)


def work_of(request: Request) -> PromptWork:
    """What it wants of its prompt besides KV."""
    assert request.prompt_work is not None
    return request.prompt_work
