"""The API key that commands send to a coordinator."""

from __future__ import annotations

import os

from pdserve.config import API_KEY_VARIABLE


def key_headers() -> dict[str, str]:
    """HTTP headers with the API key from the environment; none if it is not set."""
    key = os.environ.get(API_KEY_VARIABLE, "")
    return {"Authorization": f"Bearer {key}"} if key else {}
