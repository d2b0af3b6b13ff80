"""The page as one document: its parts are put together at start, and it needs nothing else.

Its policy allows the browser to run and load what is in it, and nothing from elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from aiohttp import web

from coordinator.api.context import ApiContext

_STYLES = ("theme.css", "layout.css", "cluster.css", "tools.css")
_SCRIPTS = (
    "elements.js",
    "access.js",
    "window.js",
    "charts.js",
    "nodes.js",
    "journeys.js",
    "playground.js",
    "page.js",
)


async def get_page(_: ApiContext) -> web.Response:
    """GET /: return the page. It has no secrets: what it shows, it asks for with a key."""
    body, headers = _page()
    return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    style = "\n".join(map(_asset, _STYLES))
    script = "(() => {\n" + "\n".join(map(_asset, _SCRIPTS)) + "\n})();"
    page = _asset("page.html").replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src {_hash(style)}; "
        f"script-src {_hash(script)}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return page.encode(), headers


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text().strip()


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
