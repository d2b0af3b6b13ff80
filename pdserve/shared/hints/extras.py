"""How the packages of an extra are installed. pdserve itself is on no package index."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The command for one of the extras of pyproject.toml, in the clone that pdserve is from."""
    return f"pip install -e '.[{extra}]' in pdserve's clone"
