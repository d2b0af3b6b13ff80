"""GET /openapi.json and /docs."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from aiohttp import web

from coordinator.api.openapi.document import DESCRIPTION
from coordinator.api.openapi.operation import HTML, JSON


async def get_document(request: web.Request) -> web.Response:
    """GET /openapi.json: return the document."""
    return web.Response(body=request.app[DESCRIPTION].document, content_type=JSON)


async def get_page(request: web.Request) -> web.Response:
    """GET /docs: return a page that shows the document without external resources."""
    return web.Response(body=_page(), content_type=HTML, charset="utf-8")


@cache
def _page() -> bytes:
    return files(__package__).joinpath("page.html").read_bytes()
