"""A codec of pools whose rows have been rounded to codes of 8 bits as they were stored.

There a row is codes times a scale, to the bit: so these are all that is sent. Nothing is rounded
here: whoever stores KV rounds it (`KvLayout.rounded_to`), whether it will be sent or not. So a
request has the same tokens on whichever way its KV has come.
"""

from __future__ import annotations

import numpy as np

from kv_transfer.codecs.codec import Bytes, Codec
from pdserve import _native
from pdserve.kv import KvDtype, KvLayout
from pdserve.shared.errors import CorruptTransfer

_SCALE_BYTES = 4


def row_codecs(layout: KvLayout) -> dict[str, Codec]:
    """The codec of such a pool, named as what its rows are rounded to; of others none.

    Nor of rows so short that a scale takes what codes save.
    """
    codes, row_bytes = layout.rounded_to, layout.planes[0].row_bytes
    if codes is None or layout.head_dim + _SCALE_BYTES >= row_bytes:
        return {}
    return {str(codes): RowCodes(layout, codes)}


class RowCodes:
    """Codes rows as `codes`; a chunk that is no such rows is sent as it is."""

    def __init__(self, layout: KvLayout, codes: KvDtype) -> None:
        self._codes = codes
        self._head_dim = layout.head_dim
        self._is_bfloat16 = layout.dtype is KvDtype.BFLOAT16
        self._row = (self._head_dim, self._is_bfloat16, str(codes))
        self._row_bytes = layout.head_dim * layout.dtype.itemsize

    def encode(self, chunk: Bytes) -> list[Bytes | bytes]:
        """Codes and a scale of each row."""
        coded = np.empty(self._coded_bytes(chunk), dtype=np.uint8)
        return [coded if _native.code_rows(chunk, coded, *self._row) else chunk]

    def sample(self, num_bytes: int) -> Bytes:
        """Rows of small integers, and of what has the largest code."""
        count = max(1, num_bytes // self._row_bytes)
        rows = np.random.default_rng(0).integers(-15, 16, (count, self._head_dim))
        rows[:, 0] = 127 if self._codes is KvDtype.INT8 else 448
        numbers = rows.astype(np.float32).reshape(-1)
        if self._is_bfloat16:
            return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return numbers.view(np.uint8)

    def decode(self, coded: Bytes, chunk: Bytes) -> None:
        """As Codec.decode."""
        if len(coded) == len(chunk):
            chunk[:] = coded
        elif len(coded) == self._coded_bytes(chunk):
            _native.decode_rows(coded, chunk, *self._row)
        else:
            raise CorruptTransfer(f"{len(coded)} bytes came for a chunk of {len(chunk)}")

    def _coded_bytes(self, chunk: Bytes) -> int:
        num_rows, rest = divmod(len(chunk), self._row_bytes)
        if rest:
            raise CorruptTransfer(f"a chunk of {len(chunk)} bytes is not of whole rows")
        return num_rows * (self._head_dim + _SCALE_BYTES)
