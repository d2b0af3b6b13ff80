"""What a unigram tokenizer makes of characters, as SentencePiece compiles it, checked.

It is a size, a double array that finds prefixes of a text, and what these become: texts, each with
a NUL behind it. The library that reads it goes wherever the array sends it, so a damaged one would
end the process that meets a certain text: everything that can be reached is looked at here.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

_Units = npt.NDArray[np.uint32]


def fault_of(charsmap: bytes) -> str:
    """Return what is wrong with it; "": nothing is."""
    (size,) = struct.unpack("<I", charsmap[:4]) if len(charsmap) >= 4 else (0,)
    if size % 4 or not 0 < size < len(charsmap) - 4:
        return f"of its {len(charsmap)} bytes, it says that {size} come first"
    texts = charsmap[4 + size :]
    try:
        texts.decode()
    except UnicodeDecodeError:
        return "what characters become is not UTF-8"
    units = np.frombuffer(charsmap, "<u4", size // 4, 4)
    begins = np.frombuffer(b"\0" + texts[:-1], np.uint8) == 0
    return _fault_of_array(units, begins)


def _fault_of_array(units: _Units, begins: npt.NDArray[np.bool_]) -> str:
    """Walk the array. `begins`: where in the texts one begins."""
    labels = np.arange(1, 256, dtype=np.uint32)
    is_seen = np.zeros(len(units), dtype=np.bool_)
    places = _offsets(units[:1])
    while len(places):
        if (places | 255).max() >= len(units):
            return f"it leads to {places.max()}, and has {len(units)} places"
        places = np.unique(places[~is_seen[places]])
        is_seen[places] = True
        children = places[:, None] ^ labels
        found = units[children]
        is_child = (found & 0x800000FF) == labels
        found, children = found[is_child], children[is_child]
        places = children ^ _offsets(found)
        ends = places[(found >> 8) & 1 == 1]
        if len(ends) and (ends | 255).max() < len(units):
            values = units[ends] & 0x7FFFFFFF
            if values.max() >= len(begins) or not begins[values].all():
                return "it leads to no text"
    return ""


def _offsets(units: _Units) -> _Units:
    offsets: _Units = np.left_shift(units >> 10, (units & 0x200) >> 6, dtype=np.uint32)
    return offsets
