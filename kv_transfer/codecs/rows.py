"""Codecs of pools whose rows have been rounded to codes of 8 bits as they were stored.

There a row is codes times a scale, to the bit: so these are all that is sent. Nothing is rounded
here: whoever stores KV rounds it (`KvLayout.rounded_to`), whether it will be sent or not. So a
request has the same tokens on whichever way its KV has come.
"""

from __future__ import annotations

import numpy as np

from kv_transfer.codecs.codec import Bytes, Codec
from kv_transfer.codecs.lossless import ZSTD, ZstdFrames, has_zstd
from pdserve import _native
from pdserve.kv import KvDtype, KvLayout
from pdserve.shared.errors import CorruptTransfer

_SCALE_BYTES = 4


def row_codecs(layout: KvLayout) -> dict[str, Codec]:
    """Those of such a pool, named after what its rows are rounded to; of others none.

    Nor of rows so short that a scale takes what codes save.
    """
    codes, row_bytes = layout.rounded_to, layout.planes[0].row_bytes
    if codes is None or layout.head_dim + _SCALE_BYTES >= row_bytes:
        return {}
    rows = RowCodes(layout, codes)
    packed: dict[str, Codec] = {f"{codes}-{ZSTD}": PackedRows(rows)} if has_zstd() else {}
    return {str(codes): rows} | packed


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
        return [self.codes_of(chunk)]

    def codes_of(self, chunk: Bytes) -> Bytes:
        """The same, or the chunk."""
        coded = np.empty(self.coded_bytes(chunk), dtype=np.uint8)
        return coded if _native.code_rows(chunk, coded, *self._row) else chunk

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
        elif len(coded) == self.coded_bytes(chunk):
            _native.decode_rows(coded, chunk, *self._row)
        else:
            raise CorruptTransfer(f"{len(coded)} bytes came for a chunk of {len(chunk)}")

    def coded_bytes(self, chunk: Bytes) -> int:
        """Bytes of the codes of a chunk. Raises CorruptTransfer: it is not of whole rows."""
        num_rows, rest = divmod(len(chunk), self._row_bytes)
        if rest:
            raise CorruptTransfer(f"a chunk of {len(chunk)} bytes is not of whole rows")
        return num_rows * (self._head_dim + _SCALE_BYTES)


class PackedRows:
    """Packs the codes of rows. Of trained models, small ones are the most frequent by far."""

    def __init__(self, rows: RowCodes) -> None:
        self._rows = rows
        self._frames = ZstdFrames()

    def encode(self, chunk: Bytes) -> list[Bytes | bytes]:
        """What RowCodes makes of it, in one frame."""
        return [self._frames.compress(self._rows.codes_of(chunk))]

    def sample(self, num_bytes: int) -> Bytes:
        """As Codec.sample."""
        return self._rows.sample(num_bytes)

    def decode(self, coded: Bytes, chunk: Bytes) -> None:
        """As Codec.decode."""
        sizes = self._rows.coded_bytes(chunk), len(chunk)
        self._rows.decode(self._frames.decompress(coded, *sizes), chunk)
