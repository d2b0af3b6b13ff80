"""A trace of requests in our own form: JSON lines, a header and then a line for each request.

`pdserve record` writes it, and whatever replays or predicts a load reads it. There is no text in
it, nor anything that tells whether a known text was sent: hashes are numbers of this trace alone.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line."""

    format: Literal["pdserve trace 1"] = "pdserve trace 1"
    block_tokens: int  # prompt tokens per hash id
    model: str = ""
    started: str = ""  # ISO 8601, UTC


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Each further line: a request, in the order in which they ended."""

    id: int
    timestamp: float  # ms since the recording began
    input_length: int  # tokens
    output_length: int
    hash_ids: list[int] = []  # of the full blocks of the prompt, each with all before it
    slo_class: str = ""
    follows: int | None = None  # id of the request whose whole prompt this one begins with
    think_s: float = 0.0  # between that one's end and this one
    took_s: float = 0.0  # until the last token
    error: str = ""  # code; empty: it has finished
