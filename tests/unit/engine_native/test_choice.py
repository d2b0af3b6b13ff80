"""Which kernels are chosen, and what their digest tells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve import _native
from pdserve.engine.native import choice
from pdserve.engine.native.choice import (
    EMULATED,
    Kind,
    Measure,
    choose_kernels,
    digest_of,
    measured,
    preferred,
)
from pdserve.engine.plan.forms import (
    BFLOAT16,
    FLOAT32,
    ActivationDtype,
    WeightForm,
    coded_form,
)
from pdserve.engine.plan.matrix import Matrix, Part
from pdserve.model_files.coding import Coding
from tests.kernels.cases import EACH_VARIANT, VARIANTS


def chosen(
    folder: Path | None, wanted: str = "auto", measure: Measure = measured
) -> choice.KernelChoice:
    matrices = [matrix(64)]
    return choose_kernels(matrices, ActivationDtype.BFLOAT16, BFLOAT16, folder, wanted, measure)


def matrix(num_in: int, form: WeightForm = BFLOAT16) -> Matrix:
    return Matrix("", (Part("", range(1)),), range(num_in), form)


@pytest.mark.parametrize(
    ("times", "variant"),
    [
        ({"amx": 1.0, "avx512": 2.0}, "amx"),
        ({"amx": 1.09, "avx512": 1.0}, "amx"),  # not clearly slower
        ({"amx": 1.5, "avx512": 1.08, "avx2": 1.0}, "avx512"),
        ({"portable": 1.0}, "portable"),
    ],
)
def test_a_build_is_preferred_until_another_is_clearly_faster(
    times: dict[str, float], variant: str
) -> None:
    assert preferred(times) == variant


def test_the_choice_is_measured_once_and_kept(tmp_path: Path) -> None:
    asked: list[Sequence[str]] = []

    def last_is_best(candidates: Sequence[str], *_: object) -> dict[str, float]:
        asked.append(candidates)
        return {name: float(len(candidates) - i) for i, name in enumerate(candidates)}

    first = chosen(tmp_path, measure=last_is_best)
    assert first.variant == "portable"
    assert asked == [[name for name in VARIANTS if name != EMULATED]]
    assert chosen(tmp_path, measure=lambda *_: pytest.fail("measured again")) == first


def test_nodes_that_measure_at_the_same_time_choose_alike(tmp_path: Path) -> None:
    others: list[choice.KernelChoice] = []

    def slowly(candidates: Sequence[str], *_: object) -> dict[str, float]:
        if not others:  # the other node begins later, and is done before
            others.append(choice.KernelChoice("", ""))
            others[0] = chosen(tmp_path, measure=slowly)
            return {candidates[0]: 1.0}
        return {candidates[-1]: 1.0}

    assert chosen(tmp_path, measure=slowly) == others[0]
    assert others[0].variant == "portable"


def test_a_damaged_note_is_measured_anew(tmp_path: Path) -> None:
    chosen(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    assert chosen(tmp_path).variant in VARIANTS


def test_a_build_can_be_wanted() -> None:
    for variant in VARIANTS:
        assert chosen(None, variant).variant == variant


def test_a_build_that_this_cpu_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'neon2': this CPU can run .*portable.*, or auto"):
        chosen(None, "neon2")


def test_the_measured_times_are_relative_to_the_best() -> None:
    candidates = [name for name in VARIANTS if name != EMULATED]
    coded = matrix(96, coded_form(Coding(4, 32, 8)))
    kinds = Kind.of([matrix(96), coded, coded])
    assert list(map(str, kinds)) == ["96 4 bits by 32", "96 bfloat16"]
    times = measured(candidates, kinds, ActivationDtype.BFLOAT16)
    assert times
    assert set(times) <= set(candidates)
    assert all(seconds >= 1.0 for seconds in times.values())


@pytest.mark.parametrize("variant", EACH_VARIANT)
def test_a_digest_does_not_depend_on_the_threads(variant: str) -> None:
    before = _native.num_threads()
    digests = set()
    try:
        for num_threads in (1, 3):
            _native.set_num_threads(num_threads)
            digests.add(digest_of(variant, ActivationDtype.BFLOAT16, BFLOAT16))
    finally:
        _native.set_num_threads(before)
    assert len(digests) == 1


def test_digests_tell_arithmetics_apart() -> None:
    fused = {name for name in VARIANTS if name.startswith("avx512")}
    of_float32 = {digest_of(name, ActivationDtype.FLOAT32, FLOAT32) for name in fused}
    assert len(of_float32) == min(1, len(fused))  # alike, whatever they are called
    of_pairs = {name: digest_of(name, ActivationDtype.BFLOAT16, BFLOAT16) for name in VARIANTS}
    assert of_pairs[EMULATED] != of_pairs["portable"]
    with_codes = {
        name: digest_of(name, ActivationDtype.BFLOAT16, BFLOAT16, is_coded=True)
        for name in VARIANTS
    }
    assert not {*with_codes.values()} & {*of_pairs.values()}
