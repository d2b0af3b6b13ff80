"""A block of the prefix store, as bytes and by name.

| magic | kind of KV | hash | bytes of the block | sum of the block | the block |

The kind is the fingerprint of model, revision and layout. A store is not trusted: what is in it may
have been cut off, damaged, or put there under another name.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final, NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from pdserve import _native
from pdserve.shared.errors import CorruptTransfer

_HEADER: Final = struct.Struct("<8s16s16sQQ")
_MAGIC: Final = b"pdskv\0\0\1"
_AT_BEGIN: Final = np.zeros(1, dtype=np.int64)
_MOST_NAME: Final = 100
NOBODY: Final = "_"  # of blocks that belong to no tenant
HEADER_BYTES: Final = _HEADER.size


class Key(NamedTuple):
    """What a block is called."""

    owner: str  # as `owner_name` says it
    kind: str  # fingerprint of the KV, in hexadecimal
    block_hash: bytes

    @property
    def name(self) -> str:
        """In the store; a level of folders for each part, and one of 256 for the hash."""
        digits = self.block_hash.hex()
        return f"{self.owner}/{self.kind}/{digits[:2]}/{digits}"

    @classmethod
    def of(cls, name: str) -> Key | None:
        """Return the key of a name; None: it is nobody's block."""
        parts = name.split("/")
        try:
            owner, kind, _, digits = parts
            found = cls(owner, kind, bytes.fromhex(digits))
        except ValueError:
            return None
        return found if found.name == name else None


def owner_name(owner: str) -> str:
    """Return what a tenant, or a group of them, is called in a store."""
    if not owner:
        return NOBODY
    name = "of-" + quote(owner, safe="")
    if len(name) <= _MOST_NAME:
        return name
    return f"{name[:_MOST_NAME]}-{hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()}"


def seal(key: Key, entry: NDArray[np.uint8]) -> None:
    """Write the header of an entry, uint8[HEADER_BYTES + bytes of the block], before its block."""
    num_bytes = len(entry) - HEADER_BYTES
    kind = bytes.fromhex(key.kind)
    _HEADER.pack_into(entry.data, 0, _MAGIC, kind, key.block_hash, num_bytes, _sum(entry))


def check(key: Key, entry: NDArray[np.uint8]) -> None:
    """Check that an entry is this block, as it was sealed.

    Raises:
        CorruptTransfer: it is not.
    """
    num_bytes = len(entry) - HEADER_BYTES
    expected = (_MAGIC, bytes.fromhex(key.kind), key.block_hash, num_bytes)
    *found, total = _HEADER.unpack_from(entry.data)
    if tuple(found) != expected or total != _sum(entry):
        raise CorruptTransfer(f"the prefix store has other bytes in {key.name} than were put there")


def _sum(entry: NDArray[np.uint8]) -> int:
    """The sum of an entry's block (csrc/transfer/block_sum.h)."""
    rows = np.array([[HEADER_BYTES, len(entry) - HEADER_BYTES, 0, 0]], dtype=np.int64)
    return int(_native.sum_blocks(entry, _AT_BEGIN, rows, 1)[0, 0])
