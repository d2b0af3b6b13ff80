"""Random and mutated protobuf on every stream: a message, or one of two errors."""

from __future__ import annotations

import random
from contextlib import suppress

import msgspec
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kv import KvLayout
from pdserve.protocol import NodeAddress
from pdserve.shared.errors import LayoutMismatch, MalformedMessage
from pdserve.wire import messages_pb2
from pdserve.wire.convert import Envelope, fill, read
from tests.architecture.test_wire import ENVELOPES, messages
from tests.matrix import examples

FUZZ = settings(max_examples=examples(150))


def received(envelope: Envelope, said: bytes) -> list[msgspec.Struct]:  # type: ignore[type-arg]
    """The messages; none for one of the errors that a stream's reader expects."""
    try:
        return envelope.unwrap_all(envelope._proto.FromString(said))
    except (DecodeError, MalformedMessage):
        return []


def noisy(said: bytes, noise: random.Random) -> bytes:
    """With some bits flipped, and perhaps cut short."""
    mutable = bytearray(said)
    for _ in range(noise.randint(1, 5) if mutable else 0):
        mutable[noise.randrange(len(mutable))] ^= 1 << noise.randrange(8)
    return bytes(mutable[: noise.randint(0, len(mutable))] if noise.random() < 0.3 else mutable)


@pytest.mark.parametrize("envelope", ENVELOPES.values(), ids=ENVELOPES.keys())
@FUZZ
@given(said=st.binary(max_size=200))
def test_random_bytes_become_messages_of_the_envelope_or_errors(
    envelope: Envelope, said: bytes
) -> None:  # type: ignore[type-arg]
    assert all(type(message) in envelope._fields for message in received(envelope, said))


@pytest.mark.parametrize("envelope", ENVELOPES.values(), ids=ENVELOPES.keys())
@FUZZ
@given(data=st.data(), noise=st.randoms(use_true_random=False))
def test_what_is_read_of_a_mutated_message_can_be_sent_on(
    envelope: Envelope, data: st.DataObject, noise: random.Random
) -> None:  # type: ignore[type-arg]
    struct = data.draw(st.sampled_from(list(envelope._fields)))
    said = envelope.wrap(data.draw(messages(struct))).SerializeToString()
    for message in received(envelope, noisy(said, noise)):  # can be sent on, and printed
        envelope.wrap(message)
        repr(message)


@pytest.mark.parametrize("envelope", ENVELOPES.values(), ids=ENVELOPES.keys())
def test_unknown_fields_nested_deeply_are_dropped(envelope: Envelope) -> None:  # type: ignore[type-arg]
    """Groups and messages nested a thousand deep, in a field that is not known."""
    for tag in (b"\x7b", b"\x7a\x7f"):
        assert received(envelope, tag * 10_000) == []


@FUZZ
@given(st.binary(max_size=60), st.binary(max_size=60))
def test_a_layout_that_passes_its_check_has_a_size_and_a_name(
    layout: bytes, address: bytes
) -> None:
    with suppress(DecodeError, MalformedMessage, LayoutMismatch):
        found = read(messages_pb2.KvLayout.FromString(layout), KvLayout)
        found.check()
        assert found.block_bytes > 0
        found.fingerprint("a-model", "main")
    with suppress(DecodeError, MalformedMessage):
        read(messages_pb2.NodeAddress.FromString(address), NodeAddress)


@FUZZ
@given(messages(KvLayout))
def test_any_layout_is_refused_or_can_be_computed_with(layout: KvLayout) -> None:
    proto = fill(layout, messages_pb2.KvLayout())
    arrived = read(proto, KvLayout)
    assert arrived == layout
    with suppress(LayoutMismatch):
        arrived.check()
        assert 0 < arrived.block_bytes <= 1 << 32


def test_a_dtype_that_is_not_known() -> None:
    proto = messages_pb2.KvLayout(dtype="float8")
    with pytest.raises(MalformedMessage, match="float8"):
        read(proto, KvLayout)
