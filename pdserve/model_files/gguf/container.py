"""One GGUF file: its values and the places of its tensors, all checked before anything is read.

A file is a header (magic, version, two counts), values by key, a list of tensors, and their data,
which is aligned. Nothing is allocated that the file is too short to hold.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from pdserve import _native
from pdserve.model_files.gguf.blocks import TYPES, BlockType
from pdserve.model_files.git_lfs import refuse_pointer
from pdserve.shared.errors import ModelError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
ALIGNMENT: Final = 32
_ALIGNMENT_KEY: Final = "general.alignment"
_MAX_DIMENSIONS: Final = 4
_MAX_KEY_BYTES: Final = 65_535
_LEAST_VALUE_BYTES: Final = 8 + 1 + 4 + 1  # a key of one byte, its type, and a bool
_LEAST_TENSOR_BYTES: Final = 8 + 1 + 4 + 8 + 4 + 8

_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_U32: Final = _SCALARS[4]
_U64: Final = _SCALARS[10]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is, and what it is stored as."""

    name: str
    shape: tuple[int, ...]  # the fastest axis last
    type: BlockType
    file: GgufFile
    offset: int  # of its bytes in the file

    @property
    def num_bytes(self) -> int:
        """Size of its bytes."""
        return self.type.num_bytes(math.prod(self.shape))

    @property
    def data(self) -> memoryview:
        """Its bytes, mapped."""
        return self.file.data[self.offset : self.offset + self.num_bytes]


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """A file that has been checked."""

    path: Path
    values: dict[str, Any]  # numbers, texts, booleans, and lists of such
    tensors: dict[str, GgufTensor]
    data_start: int  # where tensors begin; before it is all that is said of them
    data: memoryview  # the whole file, mapped


def read_gguf(path: Path) -> GgufFile:
    """Read what a file says, and check where its tensors are.

    Raises:
        ModelError: it is damaged, cut short, of another version, or has tensors of a type that is
            not read; says which.
    """
    with path.open("rb") as stream:
        if stream.read(4) != MAGIC:
            refuse_pointer(path)
            raise ModelError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}")
        data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    reader = _Reader(path, data)
    reader.position = 4
    version = reader.scalar(_U32)
    if version not in VERSIONS:
        is_swapped = version & 0xFFFF == 0
        what = "of a machine with the other byte order" if is_swapped else f"of version {version}"
        raise ModelError(
            f"{path} is a GGUF file {what}; versions 2 and 3 are read: convert it anew"
        )
    num_tensors, num_values = reader.scalar(_U64), reader.scalar(_U64)
    reader.check_count(num_values, _LEAST_VALUE_BYTES, "values")
    reader.check_count(num_tensors, _LEAST_TENSOR_BYTES, "tensors")
    values = _values(reader, num_values)
    entries = [_entry(reader) for _ in range(num_tensors)]
    alignment = _alignment(path, values)
    start = -(-reader.position // alignment) * alignment
    file = GgufFile(path, values, {}, start, data)
    for name, shape, kind, offset in entries:
        if name in file.tensors:
            raise ModelError(f"{path} has the tensor {name} twice")
        if offset % alignment:
            raise ModelError(f"{path}: {name} is at {offset}, which is not aligned to {alignment}")
        file.tensors[name] = GgufTensor(name, shape, kind, file, start + offset)
    _check_places(file)
    return file


class _Reader:
    """Reads from a place on; no read goes beyond the end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.position = 0
        self._data = data

    def scalar(self, kind: struct.Struct) -> Any:
        self._need(kind.size)
        (value,) = kind.unpack_from(self._data, self.position)
        self.position += kind.size
        return value

    def text(self, most_bytes: int | None = None) -> str:
        num_bytes = self.scalar(_U64)
        if most_bytes is not None and num_bytes > most_bytes:
            raise self.damaged(f"a name has {num_bytes} bytes")
        self._need(num_bytes)
        start, self.position = self.position, self.position + num_bytes
        return self._decoded(self._data[start : self.position], start)

    def texts(self, count: int) -> list[str]:
        """As `text`, so many times: vocabularies have hundreds of thousands."""
        self.check_count(count, _U64.size, "texts")
        found, self.position = _native.sized_texts(self._data, self.position, count)
        while len(found) < count:  # there is a bad one: this says what is wrong with it
            found.append(self.text())
        return found

    def array(self) -> list[Any]:
        kind, count = self.scalar(_U32), self.scalar(_U64)
        if kind == _STRING:
            return self.texts(count)
        if kind not in _SCALARS:
            raise self.damaged(f"it has a list of values of type {kind}")
        one = _SCALARS[kind]
        self.check_count(count, one.size, "values in a list")
        start, self.position = self.position, self.position + count * one.size
        return list(struct.unpack_from(f"<{count}{one.format[1:]}", self._data, start))

    def value(self) -> Any:
        kind = self.scalar(_U32)
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise self.damaged(f"it has a value of type {kind}")
        value = self.scalar(_SCALARS[kind])
        # As it was written: 1e-6, not the double nearest to the float32 nearest to it.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > len(self._data) - self.position:
            raise self.damaged(f"it is too short for {count} {what}")

    def damaged(self, why: str) -> ModelError:
        return ModelError(f"{self.path} is damaged: {why}; fetch it again")

    def _need(self, num_bytes: int) -> None:
        if num_bytes > len(self._data) - self.position:
            raise self._cut_short()

    def _cut_short(self) -> ModelError:
        return self.damaged(f"it ends at byte {len(self._data)}, within what it says of itself")

    def _decoded(self, data: memoryview, start: int) -> str:
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"a text at byte {start} is not UTF-8") from error


def _values(reader: _Reader, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        key = reader.text(_MAX_KEY_BYTES)
        if key in values:
            raise reader.damaged(f"it has the key {key} twice")
        values[key] = reader.value()
    return values


def _entry(reader: _Reader) -> tuple[str, tuple[int, ...], BlockType, int]:
    name = reader.text(_MAX_KEY_BYTES)
    num_dimensions = reader.scalar(_U32)
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise reader.damaged(f"{name} has {num_dimensions} dimensions")
    sizes = [reader.scalar(_U64) for _ in range(num_dimensions)]
    code, offset = reader.scalar(_U32), reader.scalar(_U64)
    kind = TYPES.get(code)
    if kind is None:
        known = ", ".join(one.name for one in TYPES.values())
        raise ModelError(
            f"{reader.path}: {name} is stored as {type_name(code)}, which is not read; read are "
            f"{known}"
        )
    if 0 in sizes:
        raise reader.damaged(f"{name} has no elements")
    if sizes[0] % kind.elements:
        raise reader.damaged(
            f"{name} has rows of {sizes[0]}, and {kind.name} has blocks of {kind.elements}"
        )
    return name, tuple(reversed(sizes)), kind, offset


def type_name(code: int) -> str:
    """A type that is not read, by the name that people know."""
    return _OTHER_TYPES.get(code, f"type {code}")


def _alignment(path: Path, values: dict[str, Any]) -> int:
    alignment = values.get(_ALIGNMENT_KEY, ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(
            f"{path} is damaged: {_ALIGNMENT_KEY} is {alignment!r}; it must be a power of two"
        )
    return alignment


def _check_places(file: GgufFile) -> None:
    end = file.data_start
    for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise ModelError(f"{file.path} is damaged: {tensor.name} overlaps another tensor")
        end = tensor.offset + tensor.num_bytes
        if end > len(file.data):
            raise ModelError(
                f"{file.path} is damaged: {tensor.name} ends at byte {end}, and the file has "
                f"{len(file.data)}; fetch it again"
            )


_OTHER_TYPES: Final = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
