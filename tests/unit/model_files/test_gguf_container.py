"""GGUF files as they are written, and every way in which one can be damaged: refused by name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.model_files.gguf.blocks import TYPES
from pdserve.model_files.gguf.container import read_gguf
from pdserve.model_files.gguf.model import forget_files, open_gguf
from pdserve.model_files.stored_types import stored_types
from pdserve.shared.errors import ModelError, UnknownArchitecture
from tests.gguf_files import gguf


def write(file: Path, **writer_arguments: Any) -> Path:
    """A file with two tensors, and values of several types."""
    writer = gguf.GGUFWriter(file, "llama", **writer_arguments)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_bool("yes", True)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("texts", ["a", "", "é"])
    writer.add_int64("big", -(1 << 40))
    for name in ("a.weight", "b.weight"):
        codes = gguf.quants.quantize(np.ones((4, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, codes, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "m.gguf")


@pytest.mark.parametrize("code", TYPES)
def test_blocks_are_decoded_bit_for_bit_as_the_formats_package_does(code: int) -> None:
    kind, number = TYPES[code], gguf.GGMLQuantizationType(code)
    assert kind.name == number.name
    assert (kind.elements, kind.bytes) == gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(code).integers(0, 256, (3000, kind.bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = np.asarray(gguf.quants.dequantize(blocks, number), np.float32)
        decoded = kind.decode(blocks)
    is_nan = np.isnan(expected)
    assert np.array_equal(np.isnan(decoded), is_nan)
    assert np.array_equal(decoded.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])
    # Those with a scale that is not finite, and no others, stand for what is not finite.
    is_bad = ~np.isfinite(decoded).all(axis=1)
    if kind.has_scales:
        assert is_bad.any()
        assert np.array_equal(kind.are_bad(blocks), is_bad)


def test_a_file_is_read_once_until_it_is_forgotten(file: Path) -> None:
    model = open_gguf(file)
    assert open_gguf(file) is model
    forget_files()
    assert open_gguf(file) is not model


def test_values_and_tensors_are_read(file: Path) -> None:
    model = open_gguf(file)
    values = dict(model.values)
    assert values["llama.attention.layer_norm_rms_epsilon"] == 1e-6
    assert values["yes"] is True
    assert values["numbers"] == [1, 2, 3]
    assert values["texts"] == ["a", "", "é"]
    assert values["big"] == -(1 << 40)
    tensor = model.tensors["b.weight"]
    assert tensor.shape == (4, 32)
    blocks = tensor.type.blocks(tensor.data, 32, range(1, 3), range(5, 32))
    rows = tensor.type.decode_rows(blocks, range(5, 32))
    assert rows.shape == (2, 27)
    assert np.allclose(rows, 1, atol=1e-3)
    assert stored_types(resolve_checkpoint(str(file))) == {"Q8_0": (2, 272)}


def patched(find: bytes, replace: bytes, offset: int = 0) -> Callable[[bytearray], None]:
    """Overwrite what is `offset` behind the beginning of a text."""

    def change(content: bytearray) -> None:
        place = content.index(find) + offset
        content[place : place + len(replace)] = replace

    return change


A = b"a.weight"
BEHIND = len(A)  # number of dimensions, two sizes, type, offset
DAMAGES: dict[str, tuple[Callable[[bytearray], None], str]] = {
    "magic": (patched(b"GGUF", b"GGUX"), "is no GGUF file"),
    "version 1": (patched(b"GGUF", b"\1", 4), "of version 1; versions 2 and 3 are read"),
    "byte order": (patched(b"GGUF", b"\0\0\0\3", 4), "other byte order"),
    "number of tensors": (patched(b"GGUF", b"\xff" * 8, 8), "too short for .* tensors"),
    "number of values": (patched(b"GGUF", b"\xff" * 8, 16), "too short for .* values"),
    "length of a key": (patched(b"yes", b"\xff" * 8, -8), "a name has"),
    "type of a value": (patched(b"yes", b"\x0d", 3), "value of type 13"),
    "type of a list": (patched(b"numbers", b"\x09", 11), "list of values of type 9"),
    "length of a list": (patched(b"numbers", b"\xff" * 7, 15), "too short for"),
    "a text": (patched("é".encode(), b"\xff"), "not UTF-8"),
    "dimensions": (patched(A, b"\x05", BEHIND), "a.weight has 5 dimensions"),
    "no dimensions": (patched(A, b"\x00", BEHIND), "a.weight has 0 dimensions"),
    "part of a block": (patched(A, b"\x21", BEHIND + 4), "rows of 33, and Q8_0 has blocks of 32"),
    "no elements": (patched(A, b"\x00", BEHIND + 4), "a.weight has no elements"),
    "a huge size": (patched(A, b"\xff" * 7, BEHIND + 12), "overlaps|ends at byte"),
    "unknown type": (patched(A, b"\x63", BEHIND + 20), "stored as type 99, which is not read"),
    "unread type": (patched(A, b"\x10", BEHIND + 20), "stored as IQ2_XXS, which is not read"),
    "offset": (patched(A, b"\x00\x00\x01", BEHIND + 24), "a.weight ends at byte"),
    "unaligned": (patched(A, b"\x01", BEHIND + 24), "not aligned to 32"),
    "overlap": (patched(b"b.weight", b"\x20\x00", BEHIND + 24), "overlaps"),
    "a tensor twice": (patched(b"b.weight", b"a.weight"), "a.weight twice"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_by_name(name: str, file: Path) -> None:
    change, said = DAMAGES[name]
    content = bytearray(file.read_bytes())
    change(content)
    file.write_bytes(content)
    with pytest.raises(ModelError, match=said) as info:
        resolve_checkpoint(str(file))
    assert str(file) in str(info.value)


def test_no_damage_is_anything_but_refused(file: Path, tmp_path: Path) -> None:
    """Cut anywhere, or with any byte changed: it is opened or refused, and nothing else happens."""
    whole = file.read_bytes()
    random = np.random.default_rng(0)
    damaged = tmp_path / "d.gguf"
    for number in range(600):
        content = bytearray(whole)
        if number % 3 == 0:
            content = content[: random.integers(0, len(whole) - 1)]
        else:
            content[random.integers(0, 500)] = random.integers(0, 256)
        damaged.write_bytes(content)
        with suppress(ModelError):
            read_gguf(damaged)
            assert len(whole) - len(content) < 32  # padding alone is missing


def test_parts_of_a_model_are_one(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", split_max_tensors=1)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert [part.name for part in parts] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    first, second = (open_gguf(part) for part in parts)
    assert set(first.tensors) == set(second.tensors) == {"a.weight", "b.weight"}
    assert second.path == parts[0]
    checkpoint = resolve_checkpoint(str(parts[1]))
    assert checkpoint == resolve_checkpoint(str(parts[0]))
    assert checkpoint.weight_files() == parts
    content = parts[1].read_bytes()
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(ModelError, match=r"says that it is part 0 of 2.*named as part 1 of 2"):
        resolve_checkpoint(str(parts[0]))
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf is not beside it"):
        resolve_checkpoint(str(parts[0]))
    assert content


def test_the_revision_is_of_the_content(file: Path) -> None:
    first = resolve_checkpoint(str(file))
    assert first.model_id == "m"
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)
    assert resolve_checkpoint(str(file)).revision != first.revision


def test_a_file_in_the_hubs_cache_is_that_of_the_hub(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    checkpoint = resolve_checkpoint(str(write(snapshot / "m.gguf")))
    assert checkpoint.model_id == "org/name:m.gguf"
    assert checkpoint.revision == "c" * 40


def test_an_architecture_that_is_not_served_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "g.gguf", "gemma4")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnknownArchitecture, match="architecture gemma4; supported are llama, q"):
        resolve_checkpoint(str(tmp_path / "g.gguf")).config()


def test_an_alignment_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write(file)
    content = file.read_bytes()
    key = b"general.alignment"
    value = struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, 24)
    header, rest = content[:16], content[24:]
    (count,) = struct.unpack("<Q", content[16:24])
    file.write_bytes(header + struct.pack("<Q", count + 1) + value + rest)
    with pytest.raises(ModelError, match=r"general\.alignment is 24; it must be a power of two"):
        read_gguf(file)
