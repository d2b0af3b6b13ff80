"""What native code does for vocabularies, beside the same in a few lines of Python."""

from __future__ import annotations

import math
import random
import struct

from pdserve import _native

LETTERS = ["a", "b", "é", "▁", "😀"]  # of one to four bytes


def test_pairs_are_those_that_are_a_token_together_the_best_first() -> None:
    rng = random.Random(0)
    lengths = [1 + number % 6 for number in range(600)]
    texts = sorted({"".join(rng.choices(LETTERS, k=length)) for length in lengths})
    rng.shuffle(texts)
    scores = [rng.choice([-math.inf, -3.0, -2.0, 0.5]) for _ in texts]
    ids = {text: number for number, text in enumerate(texts)}
    expected = [
        (-score, ids[text[:end]], ids[text[end:]])
        for text, score in zip(texts, scores, strict=True)
        for end in range(1, len(text))
        if math.isfinite(score) and text[:end] in ids and text[end:] in ids
    ]
    assert len(expected) > 300
    found = _native.token_pairs(texts, scores)
    assert found == [(texts[first], texts[second]) for _, first, second in sorted(expected)]


def test_texts_are_read_up_to_the_first_bad_one() -> None:
    good = [b"", "é😀".encode(), b"abc"]
    sized = [struct.pack("<Q", len(text)) + text for text in good]
    start, whole = 3, b"..." + b"".join(sized)
    expected = [text.decode() for text in good]
    for bad in (b"", b"\x09", struct.pack("<Q", 1), struct.pack("<Q", 2**64 - 1) + b"a", b"a" * 9):
        assert _native.sized_texts(memoryview(whole + bad), start, 9) == (expected, len(whole))
    torn = struct.pack("<Q", 2) + b"\xc3("  # no UTF-8
    assert _native.sized_texts(memoryview(whole + torn), start, 9) == (expected, len(whole))
    assert _native.sized_texts(memoryview(whole + torn), start, 3) == (expected, len(whole))
    assert _native.sized_texts(memoryview(whole), len(whole) + 1, 9) == ([], len(whole) + 1)
