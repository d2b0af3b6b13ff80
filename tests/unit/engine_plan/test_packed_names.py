"""Names and bytes of packed files, and revisions, of the demo model: as recorded once.

If one changes, every cache is packed anew, and nodes of different versions refuse each other's KV.
The order of packed weights is that of no instruction set, so the files are the same everywhere.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from pdserve import _native
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.engine.layers import torch_dtype
from pdserve.engine.models.config import load_model_config
from pdserve.engine.native.choice import digest_of
from pdserve.engine.native.load import load_native_weights
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.native.packed_file import PAGE_BYTES
from pdserve.engine.native.packed_folder import packed_files
from pdserve.engine.plan.forms import FORMS, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.ranks.shard import WHOLE, Shard
from pdserve.model_files.checkpoint import resolve_checkpoint

LATER: Final = Shard(1, 2, 1, 2)
WRITTEN_NS: Final = 10**18  # part of a packed file's name


class Packed(NamedTuple):
    dtype: str  # of activations
    form: str
    shard: Shard
    name: str  # of the file
    digest: str  # of what follows its first page, which names this boot


FILES: Final = [
    Packed(
        "float32",
        "float32",
        WHOLE,
        "demo-float32-732de36c7e0307ed.packed",
        "b4421c745db09e3cfce39daf3253e26babeb8bbb9a6dd87f2b4db643e40a1be2",
    ),
    Packed(
        "bfloat16",
        "bfloat16",
        WHOLE,
        "demo-bfloat16-ffd9baebaef5779c.packed",
        "5f7508960bebeb6b55321acba4e1fe76576621af4c32a6d38dda5a9e2e69836d",
    ),
    Packed(
        "bfloat16",
        "bfloat16",
        LATER,
        "demo-bfloat16-rank1of2-stage1of2-da0860fd40814010.packed",
        "cee9d2dfd966e94599b39ce2cda2c4a5db6b61bb46778bea19a108b69568fd13",
    ),
    Packed(
        "float32",
        "int8",
        WHOLE,
        "demo-float32-int8-ba2c3847772b1aab.packed",
        "7fceac956f310827bcb45c81e0d507ffd31f19ecbadeb6d67c210bee7659f7aa",
    ),
    Packed(
        "bfloat16",
        "int8",
        WHOLE,
        "demo-bfloat16-int8-4c245c4692f6ea88.packed",
        "91055af6485f08de271ce585d37b3e0076df10231291de49aa9c619a04f402f9",
    ),
    Packed(
        "bfloat16",
        "int8",
        LATER,
        "demo-bfloat16-int8-rank1of2-stage1of2-6d52e7600cc534ac.packed",
        "9dbd54636b86ece168dd5833c4bed323180c1942bfd357535fb313c78a182e6b",
    ),
]

# Build of the kernels |-> digests of (float32, bfloat16) activations with weights of their type,
# and with int8.
ARITHMETIC: Final = {
    "amx": (("e9f9b989", "4465047c"), ("80d8bcf3", "95e12d1a")),
    "avx512_bf16": (("e9f9b989", "4465047c"), ("c8e06d72", "9216890f")),
    "avx512": (("e9f9b989", "4465047c"), ("a2b9c4a0", "3a8d8663")),
    "avx2": (("72f951ae", "bb9f65d3"), ("17d97404", "f419a08f")),
    "portable": (("95c84d9b", "4ee4df78"), ("887c6e04", "4d1f20cf")),
    "amx_emulated": (("95c84d9b", "4ee4df78"), ("e3caaa12", "b4d8ebba")),
}


@pytest.mark.parametrize("packed", FILES, ids=lambda packed: packed.name)
def test_packed_files_keep_names_and_bytes(tmp_path: Path, packed: Packed) -> None:
    folder = shutil.copytree(CHECKPOINT_PATH, tmp_path / "demo")
    for file in folder.iterdir():
        os.utime(file, ns=(WRITTEN_NS, WRITTEN_NS))
    checkpoint = resolve_checkpoint(str(folder))
    assert checkpoint.revision == "3979c7a25bf01bbecb140f85ff812490"
    plan = ModelPlan.of(load_model_config(checkpoint), packed.shard, FORMS[packed.form])
    cache = PackedCache(tmp_path / "cache", 1 << 30, wait_s=30.0)
    load_native_weights(checkpoint, plan, torch_dtype(packed.dtype), cache, lambda _: None)
    (file,) = packed_files(cache.folder)
    assert file.path.name == packed.name
    assert hashlib.sha256(file.path.read_bytes()[PAGE_BYTES:]).hexdigest() == packed.digest


@pytest.mark.skipif(platform.machine() != "x86_64", reason="recorded there")
def test_builds_compute_as_they_did() -> None:
    """A node's revision ends with it: that of the weights, `+int8` if quantised, and this."""
    builds = [name for name in _native.kernel_variants() if name in ARITHMETIC]
    assert "portable" in builds
    for name in builds:
        for dtype, expected in zip(
            (ActivationDtype.FLOAT32, ActivationDtype.BFLOAT16), ARITHMETIC[name], strict=True
        ):
            found = [digest_of(name, dtype, FORMS[form]) for form in (dtype, "int8")]
            assert found == [*expected], (name, dtype)
