"""The native span loops against slices of NumPy, and their checked launchers."""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve import _native

GO = np.zeros(1, dtype=np.uint8)
STOP = np.ones(1, dtype=np.uint8)


def random_bytes(num_bytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


SOURCE = random_bytes(1 << 20)


WAYS = [way for way in _native.copy_rates()[8 << 10] if not way.endswith("summed")]


@pytest.mark.parametrize("way", ["", *WAYS])
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 1 << 19), st.integers(0, 80), st.integers(0, 40_000)),
        max_size=20,
    ),
    max_bytes=st.integers(1, 100_000),
)
def test_copy_spans_equals_slicing(
    way: str, pieces: list[tuple[int, int, int]], max_bytes: int
) -> None:
    spans, end = [], 0
    for source_offset, gap, nbytes in pieces:
        spans.append((source_offset, end + gap, nbytes))
        end += gap + nbytes
    found = np.zeros(max(end, 1), dtype=np.uint8)
    expected = found.copy()
    for source_offset, offset, nbytes in spans:
        expected[offset : offset + nbytes] = SOURCE[source_offset : source_offset + nbytes]
    table = np.array(spans, dtype=np.int64).reshape(-1, 3)
    position, total = 0, table[:, 2].sum()
    while position < total:
        before, position = (
            position,
            _native.copy_spans(found, SOURCE, table, GO, position, max_bytes, way),
        )
        assert position == min(before + max_bytes, total)
    np.testing.assert_array_equal(found, expected)


def test_every_way_of_copying_is_measured_for_every_size() -> None:
    rates = _native.copy_rates()
    assert list(rates) == [8 << 10, 16 << 10, 64 << 10]
    for found in rates.values():
        assert "cached" in found
        assert all(rate > 0 for rate in found.values())
    assert _native.copy_rates() == rates  # measured once


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"way": "slow"}, "way: expected one of copy_rates"),
        ({"start": 11}, r"start: expected 0\.\.10"),
        ({"start": -1}, r"start: expected 0\.\.10"),
        ({"max_bytes": -1}, "max_bytes: expected >= 0"),
    ],
)
def test_a_wrong_range_or_way_of_copying_is_refused(wrong: dict[str, Any], message: str) -> None:
    spans, destination = np.array([(0, 0, 10)], dtype=np.int64), np.zeros(10, np.uint8)
    with pytest.raises(ValueError, match=message):
        _native.copy_spans(destination, SOURCE, spans, GO, **wrong)
    assert not destination.any()


def test_spans_of_blocks_are_joined_where_both_sides_go_on() -> None:
    def ids(*values: int) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    whole = _native.block_spans(ids(4, 5, 6, 9), ids(0, 1, 3, 4), 100, 0, 100)
    assert whole.tolist() == [[400, 0, 200], [600, 300, 100], [900, 400, 100]]
    part = _native.block_spans(ids(4, 5), ids(0, 1), 100, 20, 30)
    assert part.tolist() == [[420, 20, 30], [520, 120, 30]]
    assert _native.block_spans(ids(), ids(), 100, 0, 100).shape == (0, 3)
    with pytest.raises(ValueError, match="destination_ids: expected 2 ids"):
        _native.block_spans(ids(1, 2), ids(1), 100, 0, 100)


@pytest.mark.parametrize(
    "span",
    [(-1, 0, 5), (0, -1, 5), (0, 0, -1), (95, 0, 6), (0, 195, 6), (2**62, 0, 2**62 + 5)],
)
def test_a_span_outside_of_a_region_moves_nothing(span: tuple[int, int, int]) -> None:
    source, destination = random_bytes(100), np.zeros(200, dtype=np.uint8)
    spans = np.array([(0, 0, 50), span], dtype=np.int64)
    with pytest.raises(ValueError, match=r"span 1 of the .*: expected .*, found .* at offset"):
        _native.copy_spans(destination, source, spans, GO)
    assert not destination.any()


def test_wrong_types_are_refused() -> None:
    spans = np.zeros((1, 3), dtype=np.int64)
    with pytest.raises(TypeError):
        _native.copy_spans(bytes(10), SOURCE, spans, GO)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _native.copy_spans(np.zeros(10, np.uint8), SOURCE, spans.astype(np.int32), GO)
    with pytest.raises(TypeError):
        _native.copy_spans(np.zeros(10, np.uint8), SOURCE, np.zeros((1, 2), dtype=np.int64), GO)
    read_only = np.zeros(10, np.uint8)
    read_only.flags.writeable = False
    with pytest.raises(TypeError):
        _native.copy_spans(read_only, SOURCE, spans, GO)


def test_a_set_flag_stops_before_the_first_byte() -> None:
    destination = np.zeros(1 << 20, dtype=np.uint8)
    spans = np.array([(0, 0, 1 << 20)], dtype=np.int64)
    assert _native.copy_spans(destination, SOURCE, spans, STOP) == 0
    assert not destination.any()


def send_all(sock: socket.socket, region: np.ndarray, spans: np.ndarray) -> None:
    position, end = 0, int(spans[:, 1].sum())
    while position < end:
        position = _native.send_spans(sock.fileno(), region, spans, position, GO, 1.0)


@pytest.mark.parametrize(("num_spans", "span_bytes"), [(5000, 100), (3, 300_000), (1, 1)])
def test_spans_over_a_socket(num_spans: int, span_bytes: int) -> None:
    """More spans than one system call takes, more bytes than a socket buffer, and one byte."""
    total = num_spans * span_bytes
    source, destination = random_bytes(total), np.zeros(total, dtype=np.uint8)
    rng = np.random.default_rng(7)
    sizes = np.full(num_spans, span_bytes)
    outgoing = np.stack([rng.permutation(num_spans) * span_bytes, sizes], axis=1)
    incoming = np.stack([rng.permutation(num_spans) * span_bytes, sizes], axis=1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=send_all, args=(theirs, source, outgoing))
        sender.start()
        position = 0
        while position < total:
            position = _native.recv_spans(ours.fileno(), destination, incoming, position, GO, 0.001)
        sender.join()
    for (source_offset, nbytes), (offset, _) in zip(outgoing, incoming, strict=True):
        piece = destination[offset : offset + nbytes]
        assert (piece == source[source_offset : source_offset + nbytes]).all()


def test_a_receiver_is_woken_for_all_that_is_left_and_then_for_anything() -> None:
    spans, region = np.array([(0, 300)], dtype=np.int64), np.zeros(300, dtype=np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours, theirs:
        fd = ours.fileno()
        assert _native.recv_spans(fd, region, spans, 0, GO, 0.0) == 0
        assert readable_from(ours) == 300
        theirs.sendall(b"x" * 100)
        assert select.select([ours], [], [], 0) == ([], [], [])
        assert _native.recv_spans(fd, region, spans, 0, GO, 0.0) == 100
        assert readable_from(ours) == 200  # also where the slice ends after a read
        theirs.sendall(b"x" * 200)
        assert select.select([ours], [], [], 10)[0] == [ours]
        assert _native.recv_spans(fd, region, spans, 100, GO, 0.0) == 300
        assert readable_from(ours) == 1
        assert (region == ord("x")).all()


def readable_from(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def test_a_silent_peer_costs_milliseconds_not_the_slice() -> None:
    ours, theirs = socket.socketpair()
    spans = np.array([(0, 100)], dtype=np.int64)
    with ours, theirs:
        started_s = time.monotonic()
        region = np.zeros(100, dtype=np.uint8)
        assert _native.recv_spans(ours.fileno(), region, spans, 0, GO, 60.0) == 0
        assert time.monotonic() - started_s < 30.0


def test_an_interrupted_wait_goes_on() -> None:
    signals: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: signals.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs:
            region, spans = np.zeros(100, dtype=np.uint8), np.array([(0, 100)])
            assert _native.recv_spans(ours.fileno(), region, spans, 0, GO, 0.05) == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert signals


def test_a_peer_that_is_gone() -> None:
    ours, theirs = socket.socketpair()
    region, spans = np.zeros(100, dtype=np.uint8), np.array([(0, 100)], dtype=np.int64)
    with ours:
        theirs.sendall(b"x" * 40)
        theirs.close()
        with pytest.raises(ConnectionResetError):
            _native.recv_spans(ours.fileno(), region, spans, 0, GO, 1.0)
        with pytest.raises(BrokenPipeError):  # and no SIGPIPE
            _native.send_spans(ours.fileno(), region, spans, 0, GO, 1.0)


def test_streams_check_their_arguments() -> None:
    ours, theirs = socket.socketpair()
    region = np.zeros(100, dtype=np.uint8)
    with ours, theirs:
        for spans in ([(50, 51)], [(-1, 1)], [(0, -1)]):
            with pytest.raises(ValueError, match=r"span 0 of the region: expected .*, found"):
                _native.send_spans(ours.fileno(), region, np.array(spans), 0, GO, 1.0)
        with pytest.raises(ValueError, match="start: expected >= 0, found -1"):
            _native.send_spans(ours.fileno(), region, np.array([(0, 1)]), -1, GO, 1.0)
        with pytest.raises(ValueError, match="slice_s"):
            _native.send_spans(ours.fileno(), region, np.array([(0, 1)]), 0, GO, float("nan"))


def test_find_stale_wants_one_generation_a_block() -> None:
    generations = np.zeros(3, dtype=np.uint64)
    with pytest.raises(ValueError, match="one for each of 2 blocks, found 1"):
        _native.find_stale(generations, np.array([0, 1]), generations[:1])
