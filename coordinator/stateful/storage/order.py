"""What a background response was ordered with: enough to generate it again."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_RUNS: Final = 3  # of one order: it may be what ended the coordinators


class Order(msgspec.Struct, kw_only=True):
    """One call of POST /v1/responses, as it is saved with its response.

    Under the same digest it draws the same seed, and finds its legs on the nodes again.
    """

    body: bytes  # JSON
    headers: dict[str, str]  # those with which a call is made on other terms
    unique: str
    request_id: str
    address: str
    key_id: str
    digest: bytes  # of its idempotency key, or of one made up for it
    created_at: int  # seconds since 1970
    is_streamed: bool
    num_runs: int = 1
