"""Requests inside a node, for tests of whatever has to do with them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from pdserve.engine.request import Request
from pdserve.lifecycle import Lifecycle
from pdserve.protocol import SamplingParams

_ids = itertools.count()
_SAMPLING = frozenset(SamplingParams.__struct_fields__)


def make_request(prompt: Sequence[int] | int, max_tokens: int = 4, **fields: Any) -> Request:
    """A greedy request with a prompt of these tokens, or of this many.

    `fields` are those of its sampling parameters (`grammar` is a text), or its own.
    """
    tokens = list(range(100, 100 + prompt)) if isinstance(prompt, int) else list(prompt)
    sampling = {name: fields.pop(name) for name in list(fields) if name in _SAMPLING}
    return Request(
        **{
            "request_id": f"r{next(_ids)}",
            "prompt_token_ids": tokens,
            "sampling": SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0} | sampling),
            "lifecycle": Lifecycle(received_s=0.0),
        }
        | fields
    )
