"""Random codes, as quantised files have them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from pdserve.model_files.coding import SUPER_INPUTS, Codes, Coding, Rounded, ScaleType

TWO_LEVELS: Final = ScaleType.TWO_LEVELS
NESTED: Final = Coding(4, 32, 0, ScaleType.NESTED, True)
CODINGS: Final = [  # each width, scale and group
    Coding(4, 32, 8),
    Coding(4, 128, 0, ScaleType.FLOAT32, True),
    Coding(4, 32, 0, TWO_LEVELS, True),
    NESTED,
    Coding(5, 32, 16),
    Coding(5, 16, 16, ScaleType.FLOAT32),
    Coding(6, 16, 32, TWO_LEVELS),
    Coding(6, 16, 32, TWO_LEVELS, True),
    Coding(8, 32, 128),
    Coding(8, 64, 0, ScaleType.FLOAT16, True),
    Coding(4, 128, 0, ScaleType.FLOAT32, True, Rounded.FLOAT16),
    Coding(8, 32, 128, ScaleType.FLOAT32, False, Rounded.BFLOAT16),
]


def random_codes(coding: Coding, num_rows: int, num_columns: int, seed: int = 0) -> Codes:
    """Weights of about 1."""
    random = np.random.default_rng(seed)
    size = 1 << coding.bits
    if coding == NESTED:
        return _random_nested(num_rows, num_columns, random)

    def numbers(least: float, most: float) -> Any:
        shape = (num_rows, num_columns // coding.group)
        if coding.scale is TWO_LEVELS:
            return random.integers(-32, 64, shape).astype(np.int8)
        return random.uniform(least, most, shape).astype(np.float16).astype(coding.scale.dtype)

    def supers() -> Any:
        shape = (num_rows, -(-num_columns // SUPER_INPUTS))
        return random.uniform(0.5 / size / 32, 2 / size / 32, shape).astype(np.float16)

    has_supers, has_minimums = coding.scale is TWO_LEVELS, coding.has_minimums
    return Codes(
        coding,
        random.integers(0, size, (num_rows, num_columns)).astype(np.uint8),
        numbers(-2 / size, 2 / size),
        numbers(-1, 1) if has_minimums else None,
        supers() if has_supers else None,
        supers() if has_supers and has_minimums else None,
    )


def _random_nested(num_rows: int, num_columns: int, random: np.random.Generator) -> Codes:
    """Whose integers are -127 to 127."""
    shape = (num_rows, num_columns // NESTED.group)
    scales = random.integers(1, 17, shape)
    minimums = random.integers(15 * scales - 127, 128)
    supers = random.uniform(0.5 / 64, 2 / 64, (num_rows, -(-num_columns // SUPER_INPUTS)))
    return Codes(
        NESTED,
        random.integers(0, 16, (num_rows, num_columns)).astype(np.uint8),
        scales.astype(np.int8),
        minimums.astype(np.int8),
        supers.astype(np.float16),
    )
