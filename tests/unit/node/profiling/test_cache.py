"""Profiles on disk: found again, and never trusted blindly."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from msgspec.structs import replace

from pdserve import _native
from pdserve.measured.perf_model import GUESS
from pdserve.node.profiling.cache import (
    Profile,
    ProfileKey,
    read_profile,
    write_profile,
)
from pdserve.node.profiling.costs import (
    KnownCosts,
    Measure,
    attention_name,
    measured_profile,
    profile_key,
    step_costs,
    step_limits,
)
from pdserve.node.start.model import load_runner, plan_model
from pdserve.protocol import StepCosts
from pdserve.settings.config import EngineConfig, NodeConfig, ProfileConfig, WeightsConfig
from pdserve.shared.process.user_cache import cache_folder
from tests.checkpoints import make_checkpoint

KEY = ProfileKey(
    model="m",
    device="Zen 9",
    dtype="bfloat16",
    threads=2,
    attention="native",
    software="pdserve 1",
    token_budget=512,
    max_batch_size=64,
    block_size=16,
    longest=2048,
)
COSTS = StepCosts(knot_tokens=[1, 8], knot_s=[0.001, 0.002], pair_s=1e-8)
PROFILE = Profile(COSTS, 0.03)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "not there yet"
    assert read_profile(folder, KEY) is None
    write_profile(folder, KEY, PROFILE)
    assert read_profile(folder, KEY) == PROFILE
    write_profile(folder, KEY, Profile(GUESS, 0.01))  # the last one stays
    assert read_profile(folder, KEY) == Profile(GUESS, 0.01)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("field", ProfileKey.__struct_fields__)
def test_everything_in_the_key_counts(tmp_path: Path, field: str) -> None:
    write_profile(tmp_path, KEY, PROFILE)
    value = getattr(KEY, field)
    other = replace(KEY, **{field: value + 1 if isinstance(value, int) else f"{value}x"})
    assert read_profile(tmp_path, other) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b'{"key": 1}',
        msgspec.json.encode({"key": replace(KEY, threads=9), "profile": PROFILE}),
        msgspec.json.encode(
            {"key": KEY, "profile": Profile(replace(COSTS, knot_tokens=[8, 1]), 0.1)}
        ),
        msgspec.json.encode({"key": KEY, "profile": Profile(replace(COSTS, knot_tokens=[]), 0.1)}),
        msgspec.json.encode(
            {"key": KEY, "profile": Profile(replace(COSTS, knot_s=[2.0, 1.0]), 0.1)}
        ),
        msgspec.json.encode({"key": KEY, "profile": Profile(replace(COSTS, pair_s=-1.0), 0.1)}),
    ],
)
def test_a_foreign_or_broken_file_is_as_good_as_none(
    tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    write_profile(tmp_path, KEY, PROFILE)
    [path] = tmp_path.iterdir()
    path.write_bytes(text)
    with caplog.at_level(logging.WARNING):
        assert read_profile(tmp_path, KEY) is None
    assert "profiling anew" in caplog.text


def test_a_folder_that_cannot_be_used_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    write_profile(file, KEY, PROFILE)
    assert "measured again" in caplog.text
    assert read_profile(file, KEY) is None


def test_the_folder_is_among_the_users_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("profiles") == tmp_path / "xdg/pdserve/profiles"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder("profiles") == tmp_path / ".cache/pdserve/profiles"


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_models_that_differ_in_weights_alone_have_one_profile(tmp_path: Path, family: str) -> None:
    def key_of(name: str, **changes: int) -> ProfileKey:
        path = make_checkpoint(tmp_path / name, family, **changes)
        engine = EngineConfig(device="cpu", kernels="portable", kv_memory="8MiB", max_model_len=32)
        config = NodeConfig(checkpoint=WeightsConfig(model=str(path)), engine=engine)
        model = plan_model(config)
        assert " at 0x" not in repr(model.config), "another process would have another key"
        return profile_key(model, step_limits(engine, model))

    one = key_of("one")
    assert key_of("two", seed=1, eos_token_id=3) == one
    assert key_of("wide", intermediate_size=160) != one


# ---- on a node: the demo model, its real runner, and very little time ---------------------------

ENGINE = EngineConfig(
    device="cpu", kv_memory="4MiB", max_model_len=256, token_budget=8, max_batch_size=4
)


def costs_of_a_start(
    folder: Path, profile: Literal["auto", "fresh", "off"], measure: Measure = measured_profile
) -> tuple[StepCosts, int]:
    """And how many steps it took."""
    known, num_steps = known_costs(folder, profile, measure)
    return known.costs, num_steps


def known_costs(
    folder: Path,
    profile: Literal["auto", "fresh", "off"],
    measure: Measure,
    *,
    is_awaited: bool = False,
) -> tuple[KnownCosts, int]:
    """As costs_of_a_start."""
    num_steps = 0

    def stepped() -> None:
        nonlocal num_steps
        num_steps += 1

    model = plan_model(NodeConfig(engine=ENGINE))
    runner = load_runner(model, None, lambda _: None)
    config = ProfileConfig(profile=profile, profile_s=0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        found = step_costs(config, ENGINE, model, runner, stepped, measure, is_awaited=is_awaited)
        return found, num_steps


def taken(profiles: Iterator[Profile]) -> Measure:
    """One after the other, in place of measuring."""
    return lambda *_: next(profiles)


def measured_well(*args: Any) -> Profile:
    """However bad the moment is."""
    return replace(measured_profile(*args), error=0.0)


def test_the_first_start_measures_and_the_second_reads(tmp_path: Path) -> None:
    measured, num_steps = costs_of_a_start(tmp_path, "auto", measured_well)
    assert num_steps > 0
    assert costs_of_a_start(tmp_path, "auto", measured_well) == (measured, 0)


def test_fresh_measures_anew_and_is_kept(tmp_path: Path) -> None:
    costs_of_a_start(tmp_path, "auto", measured_well)
    fresh, num_steps = costs_of_a_start(tmp_path, "fresh", measured_well)
    assert num_steps > 0
    assert costs_of_a_start(tmp_path, "auto", measured_well) == (fresh, 0)


def test_a_profile_from_a_bad_moment_is_measured_again_and_the_better_one_kept(
    tmp_path: Path,
) -> None:
    made = iter([Profile(COSTS, 0.5), Profile(GUESS, 0.7), Profile(GUESS, 0.04)])
    used = [costs_of_a_start(tmp_path, "auto", taken(made))[0] for _ in range(4)]
    assert used == [COSTS, COSTS, GUESS, GUESS]
    assert next(made, None) is None


@pytest.mark.parametrize("profile", ["auto", "fresh"])
def test_a_wake_measures_only_what_was_never_measured(
    tmp_path: Path, profile: Literal["auto", "fresh"]
) -> None:
    """Requests wait for it: three seconds more, as often as the machine is busy."""
    made = iter([Profile(COSTS, 0.4)])
    for _ in range(3):
        found, _ = known_costs(tmp_path, profile, taken(made), is_awaited=True)
        assert found.costs == COSTS


def test_a_profile_that_fits_nothing_is_not_used(tmp_path: Path) -> None:
    made = iter([Profile(COSTS, 0.7), Profile(COSTS, 0.04)])
    assert [costs_of_a_start(tmp_path, "auto", taken(made))[0] for _ in range(2)] == [
        GUESS,
        COSTS,
    ]


def test_a_profile_that_was_wrong_in_service_is_measured_again(tmp_path: Path) -> None:
    made = iter([Profile(COSTS, 0.02), Profile(GUESS, 0.03)])
    known = known_costs(tmp_path, "auto", taken(made))[0]
    assert costs_of_a_start(tmp_path, "auto", taken(made))[0] == COSTS
    known.doubt(1.0)
    assert [costs_of_a_start(tmp_path, "auto", taken(made))[0] for _ in range(2)] == [GUESS] * 2
    known.doubt(1.0)  # by a node that has run all the while: not about this profile
    assert costs_of_a_start(tmp_path, "auto", taken(made))[0] == GUESS
    assert next(made, None) is None


def test_off_guesses_and_leaves_nothing(tmp_path: Path) -> None:
    assert costs_of_a_start(tmp_path, "off") == (GUESS, 0)
    assert not list(tmp_path.iterdir())


def test_a_profile_depends_on_the_build_of_the_kernels() -> None:
    assert attention_name(torch.device("cpu")) == f"native-{_native.kernel_variants()[0]}"
