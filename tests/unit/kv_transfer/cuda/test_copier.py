"""Cutting spans, and copying them between regions."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.cuda.copier import HOST_COPIES, CopySizes, SpanCopier
from kv_transfer.cuda.driver import DeviceError, Region
from kv_transfer.spans.pieces import PIECE_BYTES, cut_batches, cut_chunks, cut_pieces
from kv_transfer.threads import CancelFlag
from tests.fakes.gpus import FakeDriver, FakeHost

SIZE = 200_000


def spans_of(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


@given(
    st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999), st.integers(0, 3 * PIECE_BYTES)))
)
def test_pieces_are_the_spans(rows: list[tuple[int, int, int]]) -> None:
    """As sets of (source byte, destination byte), in order."""
    spans = spans_of(*rows)
    pieces = cut_pieces(spans)
    assert (pieces[:, 2] > 0).all()
    assert (pieces[:, 2] <= PIECE_BYTES).all()

    def bytes_of(table: np.ndarray) -> np.ndarray:
        parts = [np.arange(n)[:, None] + (a, b) for a, b, n in table.tolist()]
        return np.concatenate([np.empty((0, 2), np.int64), *parts])

    np.testing.assert_array_equal(bytes_of(pieces), bytes_of(spans))


@given(
    st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999), st.integers(0, 500))),
    st.integers(1, 7),
    st.integers(1, 900),
)
def test_batches_are_the_spans(
    rows: list[tuple[int, int, int]], max_count: int, max_bytes: int
) -> None:
    spans = spans_of(*rows)
    batches = cut_batches(spans, max_count, max_bytes)
    assert all(0 < len(batch) <= max_count for batch in batches)
    assert all(batch[:, 2].sum() <= max_bytes for batch in batches)
    cut = np.concatenate([spans_of(), *batches])
    np.testing.assert_array_equal(cut_pieces(cut, 1), cut_pieces(spans, 1))


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 300)), max_size=20),
    st.integers(1, 400),
)
def test_chunks_are_the_stream(rows: list[tuple[int, int]], chunk_bytes: int) -> None:
    pool = np.random.default_rng(0).integers(0, 256, 6000, np.uint8)
    ranges = np.array(rows, dtype=np.int64).reshape(-1, 2)
    stream = np.concatenate([pool[a : a + n] for a, n in [(0, 0), *rows]])
    chunks = cut_chunks(ranges, chunk_bytes)
    assert len(chunks) == -(-len(stream) // chunk_bytes)
    for number, chunk in enumerate(chunks):
        expected = stream[number * chunk_bytes :][:chunk_bytes]
        staged = np.zeros(len(expected), np.uint8)
        for offset, at, nbytes in chunk.tolist():
            staged[at : at + nbytes] = pool[offset : offset + nbytes]
        assert chunk[:, 2].sum() == len(expected)
        np.testing.assert_array_equal(staged, expected)


class Memory:
    """Two regions of a pretended GPU."""

    def __init__(self, size: int = SIZE) -> None:
        self.host = FakeHost()
        self.driver = self.host.driver()
        self.source, self.destination = (Region(self.driver.allocate(size), size) for _ in range(2))
        self.data[:] = np.random.default_rng(1).integers(1, 256, size, np.uint8)

    @property
    def data(self) -> np.ndarray:
        return self.host.memory[self.source.address]

    @property
    def copied(self) -> np.ndarray:
        return self.host.memory[self.destination.address]


@pytest.mark.parametrize("by_engine", [False, True])
def test_spans_are_copied_whichever_way(by_engine: bool) -> None:
    memory = Memory()
    sizes = CopySizes(min_engine_bytes=0 if by_engine else SIZE, engine_batch=2, pieces=3)
    copier = SpanCopier(memory.driver, sizes)
    spans = spans_of((0, 100_000, 90_000), (90_001, 1, 16), (95_000, 50, 3), (SIZE, SIZE, 0))
    for _ in range(2):
        copier.copy(memory.destination, memory.source, spans, CancelFlag())
    expected = np.zeros(SIZE, np.uint8)
    for a, b, n in spans.tolist():
        expected[b : b + n] = memory.data[a : a + n]
    np.testing.assert_array_equal(memory.copied, expected)
    assert memory.host.num_lanes == 1
    assert set(memory.host.launches) == {"copy_batch" if by_engine else "copy_pieces"}
    copier.close()
    assert memory.host.num_lanes == 0


@pytest.mark.parametrize(
    ("nbytes", "batches_copies", "launch"),
    [
        (4 << 10, True, "copy_pieces"),
        (256 << 10, True, "copy_batch"),
        (2 << 20, True, "copy_batch"),
        (2 << 20, False, "copy_pieces"),
    ],
)
def test_300_blocks_of_any_size_are_one_launch(
    nbytes: int, batches_copies: bool, launch: str
) -> None:
    """The blocks overlap, and copying them again changes nothing: counting needs no GiB."""
    memory = Memory(nbytes + 300 * 16)
    memory.host.batches_copies = batches_copies
    copier = SpanCopier(memory.driver)
    spans = spans_of(*((16 * i, 16 * i, nbytes) for i in range(300)))
    copier.copy(memory.destination, memory.source, spans, CancelFlag())
    assert memory.host.launches == [launch]
    np.testing.assert_array_equal(memory.copied[: spans[-1, 0]], memory.data[: spans[-1, 0]])
    copier.close()


@pytest.mark.parametrize("batches_copies", [True, False])
def test_pinned_memory_is_left_to_the_engines(batches_copies: bool) -> None:
    """In calls of limited size, and without batches one by one; small copies, too."""
    memory = Memory()
    memory.host.batches_copies = batches_copies
    pinned = Region(memory.driver.pin(SIZE), SIZE)
    copier = SpanCopier(memory.driver, replace(HOST_COPIES, engine_bytes=60_000))
    spans = spans_of((0, 100_000, 90_000), (90_001, 1, 16))
    copier.copy(pinned, memory.source, spans, CancelFlag())
    copier.copy(memory.destination, pinned, spans[:, [1, 0, 2]], CancelFlag())
    expected = np.zeros(SIZE, np.uint8)
    for a, _, n in spans.tolist():
        expected[a : a + n] = memory.data[a : a + n]
    np.testing.assert_array_equal(memory.copied, expected)
    assert memory.host.launches == (["copy_batch"] * 4 if batches_copies else ["copy"] * 6)
    copier.close()


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ((SIZE - 5, 0, 6), "source"),
        ((0, SIZE - 5, 6), "destination"),
        ((-1, 0, 6), "source"),
        ((0, 0, -6), "source"),
        (((1 << 63) - 1, 0, 6), "source"),
        ((0, 6, (1 << 63) - 1), "source"),
    ],
)
def test_a_span_outside_of_a_region_is_refused(row: tuple[int, int, int], text: str) -> None:
    memory = Memory()
    copier = SpanCopier(memory.driver)
    with pytest.raises(ValueError, match=f"span 1 of the {text}"):
        copier.copy(memory.destination, memory.source, spans_of((0, 0, 5), row), CancelFlag())
    assert not memory.copied.any()
    assert memory.host.num_lanes == 0


def test_a_cancelled_copy_stops_at_the_next_launch() -> None:
    memory = Memory()
    copier = SpanCopier(memory.driver, CopySizes(pieces=1))
    cancel = CancelFlag()
    memory.host.let(copies=False)
    spans = spans_of((0, 0, 10), (10, 10, 10), (20, 20, 10))
    thread = threading.Thread(
        target=copier.copy, args=(memory.destination, memory.source, spans, cancel)
    )
    thread.start()
    cancel.set()
    memory.host.let(copies=True)
    thread.join(10)
    assert not thread.is_alive()
    assert not memory.copied[10:].any()
    copier.close()


def test_nothing_is_copied_when_it_was_cancelled_before() -> None:
    memory = Memory()
    copier = SpanCopier(memory.driver)
    cancel = CancelFlag()
    cancel.set()
    copier.copy(memory.destination, memory.source, spans_of((0, 0, 10)), cancel)
    assert not memory.copied.any()
    copier.close()


def test_a_lane_that_failed_is_not_used_again() -> None:
    memory = Memory()
    copier = SpanCopier(memory.driver)
    memory.host.copy_error = "an illegal address"
    with pytest.raises(DeviceError, match="an illegal address"):
        copier.copy(memory.destination, memory.source, spans_of((0, 0, 10)), CancelFlag())
    assert memory.host.num_lanes == 0
    memory.host.copy_error = ""
    copier.copy(memory.destination, memory.source, spans_of((0, 0, 10)), CancelFlag())
    copier.close()


def test_what_was_queued_has_ended_also_when_queueing_fails() -> None:
    """Else a copy could still be writing after the error."""
    finished = []

    class Half(FakeDriver):
        def open_lane(self):
            lane = super().open_lane()
            copy, finish = lane.copy_pieces, lane.finish

            def copy_half(destination, source, pieces):
                copy(destination, source, pieces[:1])
                raise DeviceError("no room in the queue")

            def finish_it():
                finish()
                finished.append(True)

            lane.copy_pieces, lane.finish = copy_half, finish_it
            return lane

    memory = Memory()
    copier = SpanCopier(Half(memory.host, 0))
    with pytest.raises(DeviceError, match="no room"):
        copier.copy(memory.destination, memory.source, spans_of((0, 0, 10)), CancelFlag())
    assert finished == [True]
    assert memory.copied[:10].all()
