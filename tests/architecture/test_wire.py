"""pdserve/protocol, the .proto files, the generated stubs and the conversion say the same."""

import sys
import types
import typing
from enum import EnumType, IntEnum, StrEnum
from pathlib import Path

import msgspec
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve import kv, protocol
from pdserve.protocol.version import PROTOCOL
from pdserve.shared.errors import MalformedMessage
from pdserve.wire import coordinator_pb2, envelopes, messages_pb2, session_pb2
from pdserve.wire.convert import Envelope
from tests.architecture.repository import ROOT, run
from tests.matrix import examples

INLINE = (protocol.Prompt,)
STRUCTS = [
    value
    for value in [*vars(protocol).values(), kv.KvLayout]
    if isinstance(value, type)
    and issubclass(value, msgspec.Struct)
    and value not in (msgspec.Struct, protocol.Message, *INLINE)
]
WIRE = (Path(__file__).parent / "wire_fields.txt").read_text().splitlines()
LATER = bytes([0xC2, 0x3E, 3]) + b"new"  # field 1000, of a build to come
ENVELOPES = {name: value for name, value in vars(envelopes).items() if isinstance(value, Envelope)}


def test_stubs_are_fresh(tmp_path):
    stamp = f"{sys.prefix}/.env-test-stamp"  # -o: no reason to install anything now
    run("make", "-s", "-o", stamp, f"VENV={sys.prefix}", f"PROTO_OUT={tmp_path}", "proto")
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "pdserve/wire").iterdir()}
    committed = {
        path.name: path.read_bytes() for path in (ROOT / "pdserve/wire").glob("*_pb2*.py*")
    }
    assert sorted(fresh) == sorted(committed)
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert stale == [], "run `make proto`"


def described() -> set[str]:
    """All that two builds agree on: fields, kinds of messages, calls, and values of enums."""
    files = [module.DESCRIPTOR for module in (messages_pb2, session_pb2, coordinator_pb2)]
    fields = {
        f"{message.name}.{field.name} = {field.number}: {kind_of(field)}"
        for file in files
        for message in file.message_types_by_name.values()
        for field in message.fields
    }
    calls = {
        f"{service.name}.{call.name}: {call.input_type.name} -> {call.output_type.name}"
        for file in files
        for service in file.services_by_name.values()
        for call in service.methods
    }
    enums = {value for value in vars(protocol).values() if isinstance(value, EnumType)}
    values = {f"{enum.__name__}.{value.name} == {value.value}" for enum in enums for value in enum}
    return fields | calls | values


def kind_of(field: FieldDescriptor) -> str:
    kind = str(field.type) if field.message_type is None else field.message_type.name
    return kind + " repeated" * (field.default_value == [])


def test_what_builds_agree_on_is_only_added_to():
    """Else a process of the build before would read something else than was written.

    It leaves out fields and kinds of messages that it does not know, but a value of an enum it
    refuses: one that is new is only for those who speak the protocol that has it.
    """
    known, now = set(WIRE[1:]), described()
    assert known - now == set(), "they were changed or removed: raise PROTOCOL twice before that"
    assert now - known == set(), "add these lines to wire_fields.txt"


def test_the_protocol_moves_only_with_a_test_of_its_own():
    """The first line names it: over processes that speak this protocol and the one before."""
    number, test = WIRE[0].split(": ")
    path, name = test.split("::")
    assert number == f"PROTOCOL {PROTOCOL}", "name the test of what others would do wrong"
    assert f"async def {name}(" in (ROOT / path).read_text()


def fields_of(struct: type[msgspec.Struct]) -> list[str]:
    """The names of its fields, and of those that it has inline."""
    hints = typing.get_type_hints(struct)
    parts = {name: [name] for name in struct.__struct_fields__}
    parts |= {name: fields_of(hint) for name, hint in hints.items() if hint in INLINE}
    return [field for part in parts.values() for field in part]


@pytest.mark.parametrize("struct", sorted(set(STRUCTS), key=lambda s: s.__name__))
def test_every_message_has_a_proto_of_the_same_fields(struct):
    descriptor = messages_pb2.DESCRIPTOR.message_types_by_name[struct.__name__]
    assert sorted(field.name for field in descriptor.fields) == sorted(fields_of(struct))


def test_every_proto_is_a_message():
    names = {struct.__name__ for struct in STRUCTS}
    assert set(messages_pb2.DESCRIPTOR.message_types_by_name) == names


def values(hint: object) -> st.SearchStrategy:
    """Any value of a field's type, as far as protobuf can carry it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (some,) = (kind for kind in inner if kind is not type(None))
        return st.none() | values(some)
    if origin is list:
        return st.lists(values(inner[0]), max_size=4)
    if origin is tuple:
        return st.lists(values(inner[0]), max_size=4).map(tuple)
    if origin is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=4)
    assert isinstance(hint, type)
    if issubclass(hint, msgspec.Struct):
        return st.deferred(lambda: messages(hint))
    if issubclass(hint, IntEnum | StrEnum):
        return st.sampled_from(hint)
    plain = {
        bool: st.booleans(),
        int: st.integers(-(2**31), 2**31 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(),
        bytes: st.binary(),
    }
    return plain[hint]


def messages(struct: type[msgspec.Struct]) -> st.SearchStrategy:
    """Any message of that kind."""
    hints = typing.get_type_hints(struct)
    return st.builds(struct, **{name: values(hints[name]) for name in struct.__struct_fields__})


BODIES = [
    pytest.param(envelope, struct, id=f"{name}-{struct.__name__}")
    for name, envelope in ENVELOPES.items()
    for struct in envelope._bodies.values()
]


@pytest.mark.parametrize(("envelope", "struct"), BODIES)
@settings(max_examples=examples(8))
@given(data=st.data())
def test_every_message_survives_its_envelope(envelope, struct, data):
    message = data.draw(messages(struct))
    proto = envelope.wrap(message)
    received = envelope._proto.FromString(proto.SerializeToString())
    assert envelope.unwrap(received) == message
    envelope.add(message, proto)
    received = envelope._proto.FromString(proto.SerializeToString())
    assert envelope.unwrap_all(received) == [message, message]
    with pytest.raises(MalformedMessage, match="with 1 others"):
        envelope.unwrap(received)
    later = envelope.wrap(message)
    getattr(later.messages[0], later.messages[0].WhichOneof("body")).MergeFromString(LATER)
    later.messages.add().MergeFromString(LATER)
    received = envelope._proto.FromString(later.SerializeToString())
    assert envelope.unwrap(received) == message, "what a later build adds is left out"
    del received.messages[0]
    with pytest.raises(MalformedMessage, match=r"nothing in .* that this build knows"):
        envelope.unwrap(received)
    received.messages.add()
    with pytest.raises(MalformedMessage, match="an empty"):
        envelope.unwrap_all(received)
