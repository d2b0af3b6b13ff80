"""Client libraries that take seconds to import: for who uses them, not for who collects tests."""

from __future__ import annotations

from typing import Any

import pytest


def anthropic() -> Any:
    """Anthropic's; skips the test where it is not installed."""
    return pytest.importorskip("anthropic", reason="the test extra is not complete")
