"""What identifies the content of weight files, whatever their format."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Final

from pdserve.model_files.gguf.container import GgufFile
from pdserve.model_files.gguf.model import open_gguf
from pdserve.model_files.git_lfs import refuse_pointer
from pdserve.shared.errors import ModelError

_SAMPLE_BYTES: Final = 256

Spans = list[tuple[int, int]]  # start and end of each tensor's bytes in the file


def content_revision(config: bytes, files: list[Path]) -> str:
    """Return a hash of config.json and of weight files. Raises ModelError: one is damaged."""
    digest = hashlib.blake2b(digest_size=16)
    for part in [config, *map(_file_digest, files)]:
        digest.update(hashlib.blake2b(part).digest())
    return digest.hexdigest()


def weight_header(file: Path) -> bytes:
    """What a weight file says of its tensors: all before their bytes. Raises ModelError."""
    if not _is_safetensors(file):
        gguf = _gguf(file)
        return bytes(gguf.data[: gguf.data_start])
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if header_bytes > size - 8:
            raise ModelError(f"{file} is damaged: it is shorter than its header says")
        return stream.read(header_bytes)


def _file_digest(file: Path) -> bytes:
    """Hash of a file's name, size and header, and of some bytes of each tensor."""
    refuse_pointer(file)
    digest = hashlib.blake2b(f"{file.name}\0{file.stat().st_size}\0".encode())
    header = weight_header(file)
    digest.update(header)
    with file.open("rb") as stream:
        for start, end in _spans(file, header):
            stream.seek(max(start, (start + end - _SAMPLE_BYTES) // 2))
            digest.update(stream.read(min(_SAMPLE_BYTES, end - start)))
    return digest.digest()


def _spans(file: Path, header: bytes) -> Spans:
    if not _is_safetensors(file):
        tensors = _gguf(file).tensors.values()
        return sorted((tensor.offset, tensor.offset + tensor.num_bytes) for tensor in tensors)
    begin = 8 + len(header)
    try:
        entries = json.loads(header)
        spans = [e["data_offsets"] for name, e in entries.items() if name != "__metadata__"]
        found = sorted((begin + int(start), begin + int(end)) for start, end in spans)
    except (ArithmeticError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelError(f"{file} is damaged: its header is not a safetensors header") from error
    size = file.stat().st_size
    if any(not begin <= start <= end <= size for start, end in found):
        raise ModelError(f"{file} is damaged: its header places a tensor outside of it")
    return found


def _is_safetensors(file: Path) -> bool:
    return file.suffix == ".safetensors"


def _gguf(file: Path) -> GgufFile:
    return next(part for part in open_gguf(file).files if part.path == file)
