"""The numbers of rows for which steps with prompts are captured (`pieces.py`). No Triton here."""

from __future__ import annotations

from typing import Final

# Up to 256 rows a layer takes about as long as reading its weights, so rows that fill up are free.
# Above, they are at most a fifth. Steps of more than 2048 take so much longer than launching them
# that graphs would gain nothing, and would lose what fills them up.
_SIZES: Final = (
    *(16, 32, 64, 128, 192, 256),
    *(320, 384, 448, 512),
    *(640, 768, 896, 1024),
    *(1280, 1536, 1792, 2048),
)
MOST_PIECE_ROWS: Final = _SIZES[-1]


def piece_sizes(most_tokens: int) -> tuple[int, ...]:
    """Return the numbers of rows of the pieces for steps of up to `most_tokens`."""
    if most_tokens >= MOST_PIECE_ROWS:
        return _SIZES
    return (*(size for size in _SIZES if size < most_tokens), most_tokens)
