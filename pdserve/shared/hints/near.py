"""The name that was meant by one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def nearest(name: str, names: Collection[str]) -> str:
    """Say which name was meant, to be added to an error; nothing if none is near.

    A name counts as near too if only its section is missing or wrong.
    """
    last = name.rpartition(".")[2].replace("-", "_")
    elsewhere = [other for other in names if other.rpartition(".")[2] == last]
    near = elsewhere or difflib.get_close_matches(name, names, n=1)
    if not near:
        lasts = {other.rpartition(".")[2]: other for other in names}
        near = [lasts[key] for key in difflib.get_close_matches(last, lasts, n=1)]
    return f"; did you mean `{near[0]}`?" if near else ""
