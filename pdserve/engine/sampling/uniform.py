"""Random numbers that are a function of a key and a counter: Philox 4x32 with 10 rounds.

Without state, there is nothing to transfer when a request moves to another node, and other requests
in the batch have no influence. See Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3"
(SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]  # 32-bit words, stored in 64 bits so that products fit

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) with 52 random bits for each pair of seed and position.

    With 52 bits, unlike 53, the product with any total always rounds to less than that total.

    Args:
        seeds: any integers; seeds that are equal modulo 2**64 give the same numbers.
        positions: 0 or more, below 2**64.
    """
    words = philox([s % 2**64 for s in seeds], list(positions))
    bits = (words[0] << _32 | words[1]) >> np.uint64(12)
    return bits.astype(np.float64) * 2.0**-52


def philox(keys: Sequence[int], counters: Sequence[int]) -> tuple[Words, Words, Words, Words]:
    """Return the four output words of Philox 4x32-10; 64-bit keys and counters (upper half 0)."""
    key = np.array(keys, dtype=np.uint64)
    counter = np.array(counters, dtype=np.uint64)
    k0, k1 = key & _MASK, key >> _32
    c0, c1 = counter & _MASK, counter >> _32
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> _32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3
