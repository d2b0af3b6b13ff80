"""Builds JSON responses."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web


def json_answer(body: msgspec.Struct | Mapping[str, object], status: int = 200) -> web.Response:
    """Return a response with `body` as JSON."""
    return web.Response(
        status=status, body=msgspec.json.encode(body), content_type="application/json"
    )
