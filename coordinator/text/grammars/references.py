"""What `$ref` points to in a client's schema: a place in the same schema, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from coordinator.text.grammars.places import SchemaPlace
from pdserve.grammar.subschemas import pointer, subschemas

_NAMES = ("$anchor", "$dynamicAnchor")


class References:
    """Finds what references of one schema mean."""

    def __init__(self, root: dict[str, Any], param: str) -> None:
        self._root = root
        self._param = param
        self._anchors: dict[str, tuple[str, ...]] | None = None

    def target(self, reference: Any, place: SchemaPlace) -> tuple[Any, SchemaPlace]:
        """Return the schema that a reference means. Raises InvalidRequest."""
        if not isinstance(reference, str):
            raise place.refusal("$ref", "must be a string")
        self._check_base(place)
        document, _, fragment = reference.partition("#")
        if document and document != str(self._root.get("$id", self._root.get("id"))).rstrip("#"):
            raise place.refusal(
                "$ref", "must be to a place in the same schema, such as '#/$defs/a'"
            )
        path = self._path(unquote(fragment), place)
        found: Any = self._root
        for name in path:
            if isinstance(found, list) and name.isdecimal() and int(name[:9]) < len(found):
                found = found[int(name[:9])]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                raise place.refusal("$ref", "points to nothing in this schema")
        return found, SchemaPlace(self._param, path)

    def _path(self, fragment: str, place: SchemaPlace) -> tuple[str, ...]:
        if not fragment:
            return ()
        if fragment.startswith("/"):
            names = fragment[1:].split("/")
            return tuple(name.replace("~1", "/").replace("~0", "~") for name in names)
        if self._anchors is None:
            self._anchors = dict(_anchors(self._root, ()))
        if fragment not in self._anchors:
            raise place.refusal("$ref", "names an anchor that this schema lacks")
        return self._anchors[fragment]

    def _check_base(self, place: SchemaPlace) -> None:
        """Refuse references from a schema with an address of its own: they mean its places."""
        node: Any = self._root
        for name in place.path:
            node = node[int(name)] if isinstance(node, list) else node[name]
            own = node.get("$id", "#") if isinstance(node, dict) else "#"
            if isinstance(own, str) and not own.startswith("#"):
                raise place.refusal(
                    "$ref", "is not supported inside of a schema with its own '$id'"
                )


def _anchors(schema: Any, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name and the path of each anchor."""
    if not isinstance(schema, dict):
        return
    for keyword in _NAMES:
        if isinstance(schema.get(keyword), str):
            yield schema[keyword], path
    for names, inner in subschemas(schema):
        yield from _anchors(inner, (*path, *names))


def check_ends(links: Mapping[str, tuple[str, SchemaPlace]]) -> None:
    """Check that references lead to a schema, and not round in a circle. Raises InvalidRequest.

    `links`: references to what is nothing but another one |-> that one, and where it stands.
    """
    followed: set[str] = set()
    for start in links:
        reference, passed = start, set[str]()
        while reference in links and reference not in followed:
            followed.add(reference)
            passed.add(reference)
            reference, place = links[reference]
            if reference in passed:
                raise place.refusal(
                    "$ref", "leads only back to itself, but must lead to a schema that says more"
                )


def definition(path: tuple[str, ...]) -> tuple[str, str]:
    """Return the name that a schema at this path has among definitions, and a reference to it."""
    name = pointer(path)[1:]
    escaped = name.replace("~", "~0").replace("/", "~1")
    return name, f"#/$defs/{quote(escaped, safe='~')}"
