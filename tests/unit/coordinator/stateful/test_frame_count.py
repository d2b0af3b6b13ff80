"""Frames are counted right however they arrive."""

from __future__ import annotations

import pytest

from coordinator.stateful.frame_count import MAX_FRAGMENTS, MAX_UNREAD, FrameCount

PING = b"\x89\x80mask"


def frame(num_bytes: int, first: int = 0x81) -> bytes:
    if num_bytes < 126:
        size = bytes([0x80 | num_bytes])
    elif num_bytes < 2**16:
        size = b"\xfe" + num_bytes.to_bytes(2, "big")
    else:
        size = b"\xff" + num_bytes.to_bytes(8, "big")
    return bytes([first]) + size + b"mask" + b"\x89" * num_bytes  # as if each byte were a ping


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 100_000])
def test_frames_in_pieces(piece: int) -> None:
    sizes = [0, 1, 125, 126, 127, 300, 70_000]
    raw = b"".join(map(frame, sizes)) + PING * (MAX_UNREAD - len(sizes))
    frames = FrameCount()
    assert all(frames.add(raw[i : i + piece]) for i in range(0, len(raw), piece))
    assert not frames.add(PING)


def test_what_is_read_makes_room() -> None:
    frames = FrameCount()
    for _ in range(3):
        assert frames.add(PING * MAX_UNREAD)
        for _ in range(MAX_UNREAD):
            frames.read()


def test_a_message_has_few_fragments_and_pings_between_them_do_not_end_it() -> None:
    frames = FrameCount()
    assert frames.add(frame(0, 0x01) + frame(1, 0x00) * (MAX_FRAGMENTS - 3) + PING)
    assert frames.add(frame(1, 0x00))
    assert not frames.add(frame(1, 0x00))
    again = FrameCount()
    assert again.add((frame(0, 0x01) + frame(1, 0x00) * 1000 + frame(0, 0x80)) * 10)
