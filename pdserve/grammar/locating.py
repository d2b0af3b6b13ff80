"""Finds what in a document of grammars cannot be used, once it is known that something cannot."""

from __future__ import annotations

import json
from typing import Any

from pdserve.grammar.matching import new_matcher
from pdserve.grammar.subschemas import Path, pointer, subschemas
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.shared.errors import GrammarFailed

_MAX_TRIES = 64  # each takes about a millisecond


class SchemaSearch:
    """The search in one document."""

    def __init__(self, vocabulary: Vocabulary, document: str) -> None:
        self._vocabulary = vocabulary
        self._parts: list[dict[str, Any]] = json.loads(document)["grammars"]
        self._tries_left = _MAX_TRIES

    def place(self) -> tuple[str, str]:
        """Return the name of a grammar that fails by itself, and the JSON pointer into its schema.

        Each is empty if it is not known.
        """
        for part in self._parts:
            schema = part.get("json_schema")
            if isinstance(schema, dict) and self._fails(schema):
                return part.get("name", ""), self._pointer(schema)
        return "", ""

    def _pointer(self, schema: dict[str, Any]) -> str:
        shared = {name: schema[name] for name in ("$defs", "x-guidance") if name in schema}
        path: Path = ()
        found: Path | None = ()
        while found is not None:
            path, found = (*path, *found), None
            inside = sorted(subschemas(schema), key=lambda one: one[0][0] != "$defs")
            for names, inner in inside:  # what others refer to first
                if isinstance(inner, dict) and self._fails(inner | shared):
                    found, schema = names, inner
                    break
        if path[:1] == ("$defs",):  # its name is where it stood
            return "#" + path[1] + pointer(path[2:])[1:]
        return pointer(path)

    def _fails(self, schema: dict[str, Any]) -> bool:
        self._tries_left -= 1
        if self._tries_left < 0:
            return False
        try:
            new_matcher(self._vocabulary, json.dumps({"grammars": [{"json_schema": schema}]}))
        except GrammarFailed:
            return True
        return False
