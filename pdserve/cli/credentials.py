"""The key that commands show a coordinator, if there is one."""

from __future__ import annotations

import os

from pdserve.config import API_KEY_VARIABLE


def key_headers() -> dict[str, str]:
    """HTTP headers with the key of the environment."""
    key = os.environ.get(API_KEY_VARIABLE, "")
    return {"Authorization": f"Bearer {key}"} if key else {}
