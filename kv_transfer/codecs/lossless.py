"""A lossless codec: Zstandard, of the bytes of numbers that have a pattern.

The uppermost byte of a float has its sign and exponent, and exponents of KV are much alike: of two
bytes of bfloat16 this one takes about three bits. The others are as good as random, and are sent as
they are. Codes of 8 bits gain a sixth to a half, as small ones are more frequent.
"""

from __future__ import annotations

import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import numpy as np

from kv_transfer.codecs.codec import Bytes, Codec
from pdserve import _native
from pdserve.shared.errors import CorruptTransfer

if TYPE_CHECKING:
    import zstandard

ZSTD: Final = "zstd"
_LEVEL: Final = 1  # 3 takes twice the time and gains nothing


def has_zstd() -> bool:
    """Whether this process has Zstandard."""
    return find_spec("zstandard") is not None


def lossless_codecs(width: int) -> dict[str, Codec]:
    """Those that this process has, by name, for numbers of so many bytes."""
    return {ZSTD: ZstdPlanes(width)} if has_zstd() else {}


class _Contexts(threading.local):
    """Zstandard's working memory, of each thread: a megabyte or two."""

    def __init__(self) -> None:
        import zstandard  # by who codes only

        self.compressor: zstandard.ZstdCompressor = zstandard.ZstdCompressor(_LEVEL)
        self.decompressor: zstandard.ZstdDecompressor = zstandard.ZstdDecompressor()
        self.content_size = zstandard.frame_content_size
        self.error: type[Exception] = zstandard.ZstdError


class ZstdFrames:
    """Zstandard's frames of bytes. Used in threads, by several at the same time."""

    def __init__(self) -> None:
        self._contexts: _Contexts | None = None

    def compress(self, content: Bytes) -> bytes:
        """The frame of these bytes."""
        return self._own.compressor.compress(content.data)

    def decompress(self, frame: Bytes, *counts: int) -> Bytes:
        """What a frame has, one of so many bytes.

        Raises:
            CorruptTransfer: it is no frame, or of another size.
        """
        own = self._own
        try:
            if own.content_size(frame.data) not in counts:  # which would be allocated
                raise CorruptTransfer(f"a frame that is not of {counts[0]} bytes came from a peer")
            return np.frombuffer(own.decompressor.decompress(frame.data), dtype=np.uint8)
        except own.error as error:
            raise CorruptTransfer(f"what came from a peer cannot be decoded: {error}") from error

    @property
    def _own(self) -> _Contexts:
        if self._contexts is None:
            self._contexts = _Contexts()
        return self._contexts


class ZstdPlanes:
    """Codes the uppermost bytes of numbers of 1, 2 or 4 bytes."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._frames = ZstdFrames()

    def encode(self, chunk: Bytes) -> list[Bytes | bytes]:
        """The uppermost bytes, coded, then all others."""
        if self._width == 1:
            return [self._frames.compress(chunk)]
        planes = np.empty_like(chunk)
        _native.split_planes(chunk, planes, self._width)
        count = len(chunk) // self._width
        return [self._frames.compress(planes[:count]), planes[count:]]

    def sample(self, num_bytes: int) -> Bytes:
        """Normally distributed numbers, in bfloat16, whatever the width is."""
        numbers = np.random.default_rng(0).normal(size=num_bytes // 2).astype(np.float32)
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)

    def decode(self, coded: Bytes, chunk: Bytes) -> None:
        """As Codec.decode."""
        count, odd = divmod(len(chunk), self._width)
        rest = len(chunk) - count
        if odd or len(coded) < rest:
            raise CorruptTransfer(f"{len(coded)} bytes came for a chunk of {len(chunk)}")
        top = self._frames.decompress(coded[: len(coded) - rest], count)
        if self._width == 1:
            chunk[:] = top
            return
        planes = np.concatenate([top, coded[len(coded) - rest :]])
        _native.join_planes(planes, chunk, self._width)
