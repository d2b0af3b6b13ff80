"""Chunks that are coded bring equal bytes; what is no chunk is an error."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kv_transfer.codecs.catalog import codecs_for
from kv_transfer.codecs.chunks import HEAD, Decoder, Encoder
from kv_transfer.codecs.codec import max_coded_bytes
from kv_transfer.spans.plan import Spans
from pdserve.kv import KvDtype, KvLayout
from pdserve.shared.errors import CorruptTransfer, PeerLost

DTYPES = [KvDtype.FLOAT32, KvDtype.BFLOAT16, KvDtype.FLOAT16, KvDtype.INT8, KvDtype.FP8]


def layout_of(dtype: KvDtype) -> KvLayout:
    return KvLayout.gqa(layers=2, heads=3, head_dim=40, block_size=16, dtype=dtype)


def numbers(count: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Normally distributed ones, in bfloat16."""
    values = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def random_spans(rng: np.random.Generator, rows: int, row_bytes: int) -> Spans:
    """Spans of whole rows that do not overlap, in any order: [n, 2] (offset, nbytes)."""
    cuts = np.unique(rng.integers(0, rows, 12)) * row_bytes
    spans = np.stack([cuts[:-1], np.diff(cuts)], axis=1)[::2]
    return np.ascontiguousarray(rng.permutation(spans))


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bytes_arrive_wherever_spans_begin(dtype: KvDtype) -> None:
    layout, rng = layout_of(dtype), np.random.default_rng(7)
    row_bytes = layout.planes[0].row_bytes
    rows = (6 << 20) // row_bytes  # of several chunks
    source = rng.integers(0, 256, rows * row_bytes, dtype=np.uint8)
    codec = codecs_for(layout)["zstd"]
    for _ in range(5):
        spans = random_spans(rng, rows, row_bytes)
        target = np.zeros_like(source)
        encoder, decoder = Encoder(codec, source, spans, layout), Decoder(codec, target, spans)
        while encoder.next_bytes:
            sent = encoder.next()
            size, coded = decoder.check(sent[: HEAD.size].tobytes())
            assert size % row_bytes == 0
            assert coded == len(sent) - HEAD.size <= max_coded_bytes(size)
            decoder.write(size, sent[HEAD.size :])
        assert decoder.is_over
        expected = np.zeros_like(source)
        for offset, nbytes in spans.tolist():
            expected[offset : offset + nbytes] = source[offset : offset + nbytes]
        assert np.array_equal(target, expected)


ROUNDED = [
    msgspec.structs.replace(layout_of(dtype), rounded_to=codes)
    for dtype in (KvDtype.BFLOAT16, KvDtype.FLOAT32)
    for codes in (KvDtype.INT8, KvDtype.FP8)
]


@pytest.mark.parametrize("layout", ROUNDED)
def test_rounded_rows_are_sent_as_codes_and_others_as_they_are(layout: KvLayout) -> None:
    codec = codecs_for(layout)[str(layout.rounded_to)]
    rows = codec.sample(1 << 16)
    (coded,) = codec.encode(rows)
    assert len(coded) * layout.planes[0].row_bytes == len(rows) * (layout.head_dim + 4)
    others = rows.copy()
    others[:64] = numbers(32, seed=1)
    (as_it_is,) = codec.encode(others)
    for sent, chunk in ((coded, rows), (as_it_is, others)):
        found = np.zeros_like(chunk)
        codec.decode(np.frombuffer(sent, dtype=np.uint8), found)
        assert np.array_equal(found, chunk)
    with pytest.raises(CorruptTransfer):
        codec.decode(np.frombuffer(coded, dtype=np.uint8)[1:], rows)


@pytest.mark.parametrize("layout", ROUNDED)
def test_codes_of_rows_are_packed_and_others_too(layout: KvLayout) -> None:
    codecs = codecs_for(layout)
    assert list(codecs) == [str(layout.rounded_to), f"{layout.rounded_to}-zstd"]
    codec = codecs[f"{layout.rounded_to}-zstd"]
    rows = codec.sample(1 << 16)
    (codes,) = codecs[str(layout.rounded_to)].encode(rows)
    others = rows.copy()
    others[:64] = numbers(32, seed=1)
    for chunk, most in ((rows, 0.9 * len(codes)), (others, len(others))):
        (sent,) = codec.encode(chunk)
        assert len(sent) < most
        found = np.zeros_like(chunk)
        codec.decode(np.frombuffer(sent, dtype=np.uint8), found)
        assert np.array_equal(found, chunk)
        for wrong in (sent[1:], sent[:-1], codes, sent + b"0"):
            with pytest.raises(CorruptTransfer):
                codec.decode(np.frombuffer(wrong, dtype=np.uint8), found[: 1 << 15])
        with pytest.raises(CorruptTransfer):
            codec.decode(np.frombuffer(sent[:-1], dtype=np.uint8), found)


def test_numbers_take_two_thirds_of_their_bytes() -> None:
    chunk = numbers(1 << 18)
    pieces = codecs_for(layout_of(KvDtype.BFLOAT16))["zstd"].encode(chunk)
    assert sum(map(len, pieces)) < len(chunk) / 1.4


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_no_codec_has_made_is_corrupt(dtype: KvDtype) -> None:
    codec = codecs_for(layout_of(dtype))["zstd"]
    chunk = numbers(4096)
    pieces = [np.frombuffer(piece, dtype=np.uint8) for piece in codec.encode(chunk)]
    coded = np.concatenate(pieces)
    target = np.zeros(len(chunk), dtype=np.uint8)
    flipped = coded.copy()
    flipped[2] ^= 0xFF
    for wrong in (coded[:0], coded[:9], coded[: len(coded) // 4], flipped):
        with pytest.raises(CorruptTransfer):
            codec.decode(wrong, target)
    with pytest.raises(CorruptTransfer):  # a frame of a gigabyte is not unpacked
        codec.decode(coded, target[:128])


@pytest.mark.parametrize("dtype", [KvDtype.FLOAT32, KvDtype.BFLOAT16])
@pytest.mark.parametrize("odd", [1, 3])
def test_half_a_number_is_corrupt(dtype: KvDtype, odd: int) -> None:
    codec = codecs_for(layout_of(dtype))["zstd"]
    whole = numbers(32)[: 16 * dtype.itemsize]  # of 16 numbers
    coded = np.concatenate([np.frombuffer(piece, dtype=np.uint8) for piece in codec.encode(whole)])
    more = np.concatenate([coded, np.zeros(odd, dtype=np.uint8)])
    with pytest.raises(CorruptTransfer):
        codec.decode(more, np.zeros(len(whole) + odd, dtype=np.uint8))


def test_rows_as_long_as_their_codes_have_none() -> None:
    layout = KvLayout.gqa(layers=1, heads=1, head_dim=4, block_size=1, dtype=KvDtype.BFLOAT16)
    assert "fp8" not in codecs_for(msgspec.structs.replace(layout, rounded_to=KvDtype.FP8))


@pytest.mark.parametrize(
    "head", [b"", HEAD.pack(0, 8), HEAD.pack(1 << 20, 8), HEAD.pack(64, 1 << 16)]
)
def test_a_head_promises_no_more_than_is_left(head: bytes) -> None:
    codec = codecs_for(layout_of(KvDtype.BFLOAT16))["zstd"]
    decoder = Decoder(codec, np.zeros(4096, dtype=np.uint8), np.array([[0, 2048]]))
    with pytest.raises(PeerLost):
        decoder.check(head)


def test_chunks_before_the_last_are_worth_a_thread() -> None:
    """Thousands of small ones would be decoded one after the other, and hold up the event loop."""
    codec = codecs_for(layout_of(KvDtype.BFLOAT16))["zstd"]
    decoder = Decoder(codec, np.zeros(1 << 20, dtype=np.uint8), np.array([[0, 1 << 20]]))
    with pytest.raises(PeerLost):
        decoder.check(HEAD.pack(4096, 4096))
    assert decoder.check(HEAD.pack(1 << 19, 4096)) == (1 << 19, 4096)
