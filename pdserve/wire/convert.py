"""Converts messages between `pdserve/protocol` and protobuf, field by field of the same name.

Codecs are built once per struct from its annotations, so a new field takes one line in the struct
and one in the .proto file; a test fails if one is missing. The fields of an `Inline` struct stand
among those of the message.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from google.protobuf.message import Message as ProtoMessage

from pdserve.protocol.message import Inline
from pdserve.shared.errors import MalformedMessage

log = logging.getLogger(__name__)

S = TypeVar("S", bound=msgspec.Struct)
P = TypeVar("P", bound=ProtoMessage)

# (struct, proto) -> None: write one field to proto;  (proto) -> value: read one field, or all.
_Writer = Callable[[Any, Any], None]
_Reader = Callable[[Any], Any]


def fill(message: msgspec.Struct, proto: P) -> P:
    """Write `message` into the empty `proto` of the same name, and return it."""
    plain, writers = _writers(type(message))
    for name in plain:
        setattr(proto, name, getattr(message, name))
    for write in writers:
        write(message, proto)
    return proto


def read(proto: ProtoMessage, struct: type[S]) -> S:
    """Convert `proto` to a message.

    Raises:
        MalformedMessage: a value that the struct does not allow, such as an unknown enum value.
    """
    plain, others = _readers(struct)
    try:
        values = [*plain(proto)]
        for index, read_value in others:
            values[index] = read_value(proto)
        return struct(*values)
    except ValueError as error:
        raise MalformedMessage(f"{struct.__name__}: {error}") from error


class Envelope(Generic[P]):
    """A protobuf message with a list of others, each one of several kinds (oneof `body`)."""

    def __init__(self, proto: type[P], bodies: Mapping[str, type[msgspec.Struct]]) -> None:
        self._proto = proto
        self._bodies = dict(bodies)
        self._fields = {struct: name for name, struct in bodies.items()}

    def wrap(self, message: msgspec.Struct) -> P:
        """An envelope with just this message. Raises as `add`."""
        proto = self._proto()
        self.add(message, proto)
        return proto

    def add(self, message: msgspec.Struct, proto: P) -> None:
        """Append `message` to the envelope `proto`.

        Raises:
            MalformedMessage: a value that protobuf cannot represent, such as too large an integer.
        """
        body = getattr(_held(proto).add(), self._fields[type(message)])
        body.SetInParent()  # marks the body as present even if all fields have default values
        try:
            fill(message, body)
        except (TypeError, ValueError) as error:
            raise MalformedMessage(f"{type(message).__name__}: {error}") from error

    def last_bytes(self, proto: P) -> int:
        """Size of the last message; for the size of the envelope all of it would be encoded."""
        size: int = _held(proto)[-1].ByteSize()
        return size

    def unwrap(self, proto: P | None) -> msgspec.Struct:
        """The only message in the envelope.

        Raises:
            MalformedMessage: as `unwrap_all`, or there are several, or none of a known kind.
        """
        messages = self.unwrap_all(proto)
        if not messages:
            raise MalformedMessage(f"nothing in {self._proto.__name__} that this build knows")
        message, *more = messages
        if more:
            raise MalformedMessage(f"{type(message).__name__} came with {len(more)} others")
        return message

    def unwrap_all(self, proto: P | None) -> list[msgspec.Struct]:
        """The messages in the envelope, without those of kinds that only later builds know.

        Raises:
            MalformedMessage: the envelope is empty or its content is invalid; or it is None, which
                is what gRPC's client returns for bytes that it cannot parse.
        """
        if proto is None:
            raise MalformedMessage(f"no {self._proto.__name__}")
        held = _held(proto)
        if not held:
            raise MalformedMessage(f"an empty {self._proto.__name__}")
        return [message for one in held if (message := self._read(one)) is not None]

    def _read(self, held: ProtoMessage) -> msgspec.Struct | None:
        name = held.WhichOneof("body")
        if name is not None:
            return read(getattr(held, name), self._bodies[name])
        if not held.ByteSize():
            raise MalformedMessage(f"an empty {type(held).__name__}")
        _tell_unknown(type(held).__name__)
        return None


@cache
def _tell_unknown(envelope: str) -> None:
    """Log it once: who depends on such a message does so by the protocol (`version.py`)."""
    log.warning("a later build sent a %s of a kind that this one does not know", envelope)


def _held(proto: Any) -> Any:
    return proto.messages


@cache
def _writers(struct: type[msgspec.Struct]) -> tuple[list[str], list[_Writer]]:
    """Return the fields that are written as they are, and the writers of the others.

    Most are plain, and no function is called for them.
    """
    hints = get_type_hints(struct)
    names = struct.__struct_fields__
    plain = [name for name in names if _is_plain(hints[name])]
    return plain, [_writer(name, hints[name]) for name in names if name not in plain]


@cache
def _readers(struct: type[msgspec.Struct]) -> tuple[_Reader, list[tuple[int, _Reader]]]:
    """Return what reads all fields in order, and the index and reader of those that are not plain.

    In their places is what anything has.
    """
    hints = get_type_hints(struct)
    others = [
        (index, _reader(name, hints[name]))
        for index, name in enumerate(struct.__struct_fields__)
        if not _is_plain(hints[name]) or _is_enum(hints[name])
    ]
    places = {index for index, _ in others}
    names = [
        "__class__" if index in places else name
        for index, name in enumerate(struct.__struct_fields__)
    ]
    if len(names) > 1:
        return attrgetter(*names), others
    return lambda proto: [getattr(proto, name) for name in names], others


def _is_plain(hint: Any) -> bool:
    is_many = get_origin(hint) in (list, tuple, dict)
    return not (_without_none(hint)[1] or _is_struct(hint) or is_many)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """(the type besides None, whether None is allowed)."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
        return inner, True
    return hint, False


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _is_inline(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Inline)


def _writer(name: str, hint: Any) -> _Writer:
    inner, optional = _without_none(hint)
    write = _plain_writer(name, inner)
    if not optional:
        return write

    def write_if_set(message: Any, proto: Any) -> None:
        if getattr(message, name) is not None:
            write(message, proto)

    return write_if_set


def _plain_writer(name: str, hint: Any) -> _Writer:
    origin = get_origin(hint)
    if _is_inline(hint):
        return lambda message, proto: fill(getattr(message, name), proto)
    if _is_struct(hint):

        def write_struct(message: Any, proto: Any) -> None:
            body = getattr(proto, name)
            body.SetInParent()
            fill(getattr(message, name), body)

        return write_struct
    if origin is list and _is_struct(get_args(hint)[0]):

        def write_structs(message: Any, proto: Any) -> None:
            repeated = getattr(proto, name)
            for item in getattr(message, name):
                fill(item, repeated.add())

        return write_structs
    if origin in (list, tuple):

        def write_list(message: Any, proto: Any) -> None:
            if values := getattr(message, name):
                getattr(proto, name).extend(values)

        return write_list
    if origin is dict:
        return lambda message, proto: getattr(proto, name).update(getattr(message, name))
    return lambda message, proto: setattr(proto, name, getattr(message, name))


def _reader(name: str, hint: Any) -> _Reader:
    inner, optional = _without_none(hint)
    read_value = _plain_reader(name, inner)
    if not optional:
        return read_value
    return lambda proto: read_value(proto) if proto.HasField(name) else None


def _plain_reader(name: str, hint: Any) -> _Reader:
    origin = get_origin(hint)
    if _is_inline(hint):
        return lambda proto: read(proto, hint)
    if _is_struct(hint):
        return lambda proto: read(getattr(proto, name), hint)
    if origin is list and _is_struct(get_args(hint)[0]):
        (item,) = get_args(hint)
        return lambda proto: [read(value, item) for value in getattr(proto, name)]
    if origin in (list, tuple):
        return lambda proto: origin(getattr(proto, name))
    if origin is dict:
        return lambda proto: dict(getattr(proto, name))
    if _is_enum(hint):
        return lambda proto: hint(getattr(proto, name))
    return lambda proto: getattr(proto, name)
