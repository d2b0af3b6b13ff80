"""Which build of the CPU kernels computes a model: the fastest on this machine, as measured.

One build computes everything, whatever the phase and the number of rows, since the bits of a row
must not depend on its batch. (So oneDNN is no candidate: it picks another kernel for another number
of rows, and the bits change.) Builds that compute alike, bit for bit, have the same digest, on
whatever machine. It is part of the revision that nodes compare, so KV of one arithmetic is never
used with another.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from pdserve import _native
from pdserve.engine.layers import torch_dtype
from pdserve.engine.models.recurrent import RecurrentShape
from pdserve.engine.native.linear import (
    LinearResult,
    PackedLinear,
    empty_packed,
    linear,
    pack,
    pack_codes,
)
from pdserve.engine.plan.forms import (
    FLOAT32,
    ActivationDtype,
    WeightForm,
    coded_form,
    fitting_form,
)
from pdserve.engine.plan.matrix import Matrix
from pdserve.model_files.coding import Codes, Coding

log = logging.getLogger(__name__)

AUTO = "auto"
EMULATED = "amx_emulated"  # too slow to be chosen

_ROWS = (1, 16, 128)  # a lone stream, a batch, a prompt; each counts as much as the others
_WEIGHT_BYTES = 4 << 20  # more than a core's own caches
_REPEATS = 3
_HOPELESS = 3.0  # a build that takes this many times as long for one number of rows is out
_CLEARLY = 0.9  # a build is preferred to a better-ranked one if it takes no more than this share


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A build of the kernels, and a digest of what it computes."""

    variant: str  # one of _native.kernel_variants()
    digest: str

    def __str__(self) -> str:
        return f"{self.variant}-{self.digest}"


class _Kept(msgspec.Struct, frozen=True):
    key: list[str]
    variant: str


def preferred(times: dict[str, float]) -> str:
    """Return the first build that no other clearly beats.

    So two machines alike choose alike, although no two measurements are.
    """
    fastest_s = min(times.values())
    return next(name for name, seconds in times.items() if seconds * _CLEARLY <= fastest_s)


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """What the time of a product depends on: matrices alike are measured once."""

    num_in: int
    form: WeightForm = field(compare=False)
    form_name: str

    @classmethod
    def of(cls, matrices: Iterable[Matrix]) -> list[Kind]:
        """Return the kinds that there are."""
        kinds = {cls(each.num_in, each.form, each.form.name) for each in matrices}
        return sorted(kinds)

    def __str__(self) -> str:
        """As kept choices have it."""
        return f"{self.num_in} {self.form_name}"


def measured(
    candidates: Sequence[str], kinds: Sequence[Kind], dtype: ActivationDtype
) -> dict[str, float]:
    """Return build |-> mean time of its products relative to the best one, without hopeless ones.

    Measured in turns, so that other work on the machine hits all of them alike.
    """
    totals = dict.fromkeys(candidates, 0.0)
    for kind in kinds:
        width, form = kind.num_in, kind.form
        num_out = max(1, _WEIGHT_BYTES * 8 // (width * form.bits * 64)) * 64
        packed = empty_packed(form, num_out, width)
        for num_rows in _ROWS:
            x = torch.zeros(num_rows, width, dtype=torch_dtype(dtype))
            out = torch.empty(num_rows, num_out, dtype=x.dtype)
            best_s = dict.fromkeys(totals, float("inf"))
            for _ in range(_REPEATS):
                for name in best_s:
                    started_s = time.perf_counter()
                    linear(x, packed, out, LinearResult.STORE, name)
                    best_s[name] = min(best_s[name], time.perf_counter() - started_s)
            fastest_s = min(best_s.values())
            totals = {
                name: totals[name] + seconds / fastest_s
                for name, seconds in best_s.items()
                if seconds < _HOPELESS * fastest_s
            }
    return {name: total / (len(kinds) * len(_ROWS)) for name, total in totals.items()}


Measure = Callable[[Sequence[str], Sequence[Kind], ActivationDtype], dict[str, float]]


def choose_kernels(
    matrices: Sequence[Matrix],
    dtype: ActivationDtype,
    form: WeightForm,
    folder: Path | None,
    wanted: str = AUTO,
    measure: Measure = measured,
    *,
    has_states: bool = False,
) -> KernelChoice:
    """Choose the build for a model.

    Args:
        matrices: all of it.
        dtype: of activations.
        form: of matrices that are not coded.
        folder: where choices are kept, so that all nodes of a host make the same; None: nowhere.
        wanted: AUTO, or the build to take.
        measure: as `measured`.
        has_states: whether layers have states instead of KV.

    Raises:
        ValueError: this CPU cannot run the wanted one; the message lists those that it can.
    """
    kinds = Kind.of(matrices)
    is_coded = any(kind.form.keeps_stored for kind in kinds)
    if wanted != AUTO:
        variants = _native.kernel_variants()
        if wanted not in variants:
            raise ValueError(f"{wanted!r}: this CPU can run {', '.join(variants)}, or {AUTO}")
        return KernelChoice(
            wanted, digest_of(wanted, dtype, form, is_coded=is_coded, has_states=has_states)
        )
    candidates = [name for name in _native.kernel_variants() if name != EMULATED]
    digests = {
        name: digest_of(name, dtype, form, is_coded=is_coded, has_states=has_states)
        for name in candidates
    }
    key = [f"{name}-{digest}" for name, digest in digests.items()]
    key += [f"torch.{dtype}", form.name, *map(str, kinds)]
    variant = _read(folder, key, candidates)
    if variant is None:
        times = measure(candidates, kinds, dtype)
        variant = _agreed(folder, key, preferred(times), candidates)
        log.info("kernels: %s (times of %s)", variant, _described(times))
    return KernelChoice(variant, digests[variant])


@lru_cache(maxsize=64)  # a node that wakes as another model asks again
def digest_of(
    variant: str,
    dtype: ActivationDtype,
    form: WeightForm,
    *,
    is_coded: bool = False,
    has_states: bool = False,
) -> str:
    """Return a digest of what a build computes of fixed inputs.

    Products with weights of that form, with codes if there are any, and with a router's; norms,
    attention, and states if there are any. Codes that are widened to float32 are nothing new.
    """
    digest, type_of_x = hashlib.blake2b(digest_size=4), torch_dtype(dtype)
    weight, x = _numbers(48, 100).to(type_of_x), _numbers(20, 100).to(type_of_x)
    out = torch.empty(20, 48)
    own = fitting_form(form, 100)
    linear(x, pack(weight, form=own), out, LinearResult.STORE_FLOAT, variant)
    router, scores = pack(weight, form=FLOAT32), torch.empty_like(out)
    linear(x, router, scores, LinearResult.STORE_FLOAT, variant)
    wide = _numbers(20, 1000)  # each lane, and what is left of the last ones, adds up some
    _native.rms_norm(wide, wide[0].clone(), 1e-5, normed := torch.empty_like(wide), variant)
    results = [out, scores, normed, _attended(variant, type_of_x)]
    if dtype is not ActivationDtype.FLOAT32:
        outlying = x[:, :96].clone()
        outlying[:, 40] *= 16
        every = [_coded()] if is_coded else []
        every += [] if form.coding is None else [pack(weight[:, :96], form=form)]
        for coded in every:
            out = torch.empty(20, 48)
            results.append(linear(outlying, coded, out, LinearResult.STORE_FLOAT, variant))
    if has_states:
        results += _gone_on(variant)
    for tensor in results:
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _coded() -> PackedLinear:
    codes = Codes(
        Coding(4, 32, 8),
        ((_numbers(48, 96) + 1) * 7.5).to(torch.uint8).numpy(),
        _numbers(48, 3).half().numpy(),
    )
    packed = empty_packed(coded_form(codes.coding), 48, 96)
    pack_codes(packed, 0, codes)
    return packed


def _attended(variant: str, dtype: torch.dtype) -> Tensor:
    num_rows, num_heads, num_kv_heads, head_dim, block_size = 20, 6, 2, 32, 16
    num_blocks = 6
    shape = (num_blocks, 1, 2, num_kv_heads, block_size, head_dim)
    pool = _numbers(num_blocks, 2 * num_kv_heads * block_size * head_dim).view(shape).to(dtype)
    # Large values that cancel out: what is left shows the order of a sum, after any rounding.
    keys, values = pool[:, 0].unbind(1)
    keys[:, :, 1::4] = keys[:, :, ::4]
    values[:, :, ::4], values[:, :, 1::4] = 4096, -4096
    query = _numbers(num_rows, num_heads * head_dim).view(num_rows, num_heads, head_dim).to(dtype)
    out = torch.empty_like(query)
    _native.paged_attention(
        query,
        pool,
        0,
        torch.tensor([0, num_rows], dtype=torch.int32),
        torch.tensor([num_blocks * block_size - 3], dtype=torch.int32),
        torch.arange(num_blocks, dtype=torch.int32)[None],
        head_dim**-0.5,
        0,
        out,
        variant=variant,
    )
    return out


def _gone_on(variant: str) -> list[Tensor]:
    """A state, and what it makes, of a prompt that is in two pieces."""
    shape = RecurrentShape(2, 4, 40, 36, 4, frozenset({0}))
    rows = _numbers(70, shape.input_width)
    vectors = _numbers(3, shape.num_values)
    taps = _numbers(shape.num_groups * shape.kernel, shape.group_channels)
    state = torch.zeros(shape.layer_bytes // 4)
    out = torch.empty(len(rows), shape.values_width)
    for first, end in ((0, 43), (43, 70)):
        _native.gated_delta(
            rows[first:end],
            taps.view(shape.num_groups, shape.kernel, -1),
            vectors[0],
            vectors[1],
            _numbers(1, shape.value_dim)[0],
            shape.num_groups,
            shape.key_dim,
            first,
            state,
            out[first:end],
            variant,
        )
    return [state, out]


def _numbers(num_rows: int, num_columns: int) -> Tensor:
    """Return [num_rows, num_columns] float32 in [-1, 1): the same everywhere."""
    bits = torch.arange(num_rows * num_columns, dtype=torch.int64) * 2654435761 >> 7 & 0xFFFF
    return (bits.float() / 0x8000 - 1).view(num_rows, num_columns)


def _described(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in times.items())


def _read(folder: Path | None, key: list[str], candidates: Sequence[str]) -> str | None:
    if folder is None:
        return None
    try:
        kept = msgspec.json.decode(_path(folder, key).read_bytes(), type=_Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("kernels are measured anew: cannot read the kept choice: %s", error)
        return None
    return kept.variant if kept.key == key and kept.variant in candidates else None


def _agreed(folder: Path | None, key: list[str], variant: str, candidates: Sequence[str]) -> str:
    """Keep a choice; if another node has kept one meanwhile, return that one.

    Busy machines measure anything, and nodes that choose differently cannot exchange KV.
    """
    if folder is None:
        return variant
    path = _path(folder, key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".new") as file:
            file.write(msgspec.json.format(msgspec.json.encode(_Kept(key, variant))))
            file.flush()
            try:
                os.link(file.name, path)
            except FileExistsError:
                if (kept := _read(folder, key, candidates)) is not None:
                    return kept
                path.unlink(missing_ok=True)  # nobody can read it
                os.link(file.name, path)
    except OSError as error:
        log.warning("kernels will be measured again next time: cannot write %s: %s", path, error)
    return variant


def _path(folder: Path, key: list[str]) -> Path:
    digest = hashlib.blake2b(msgspec.json.encode(key), digest_size=8).hexdigest()
    return folder / f"{digest}.kernels"
