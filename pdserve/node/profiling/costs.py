"""Measures what a node's steps cost, before it is READY; later starts read the cached result.

steps: which steps ──► timer: run them ──► fit: costs ──► cache
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

import pdserve
from pdserve import _native
from pdserve.engine.interface import Runner
from pdserve.measured.perf_model import GUESS, PerfModel
from pdserve.node.profiling.cache import (
    Profile,
    ProfileKey,
    doubt_profile,
    read_profile,
    write_profile,
)
from pdserve.node.profiling.fit import fit_costs, fit_error
from pdserve.node.profiling.steps import StepLimits, steps_to_profile
from pdserve.node.profiling.timer import StepTimer
from pdserve.node.start.kind import device_name
from pdserve.node.start.model import NodeModel
from pdserve.protocol import StepCosts
from pdserve.settings.config import EngineConfig, ProfileConfig
from pdserve.shared.process.user_cache import cache_folder

log = logging.getLogger(__name__)

POOR = 0.15  # error from which on the next start profiles again: the machine was too busy
USELESS = 0.5  # error from which on a guess, corrected by the first steps, is better


@dataclass(frozen=True, slots=True)
class KnownCosts:
    """What steps cost, and whom to tell if that turns out to be wrong."""

    costs: StepCosts
    doubt: Callable[[float], None] = lambda _: None  # of the kept profile; takes the relative error


# As `measured_profile`
Measure: TypeAlias = Callable[[StepLimits, Runner, float, Callable[[], None]], Profile]


def step_limits(engine: EngineConfig, model: NodeModel) -> StepLimits:
    """The limits of this node's steps."""
    of_states = engine.max_batch_size * model.layout.state_blocks  # at the end of the pool
    return StepLimits(
        token_budget=engine.token_budget,
        max_batch_size=engine.max_batch_size,
        max_model_len=model.max_model_len,
        num_blocks=max(model.num_whole_blocks // 2, model.num_whole_blocks - of_states),
        block_size=model.layout.block_size,
        vocab_size=model.config.vocab_size,
    )


def measured_profile(
    limits: StepLimits,
    runner: Runner,
    budget_s: float,
    before_each: Callable[[], None] = lambda: None,
) -> Profile:
    """Measure steps within these limits for about `budget_s`, and fit the costs."""
    started_s = time.perf_counter()
    timer = StepTimer(runner, limits.block_size, limits.vocab_size, before_each=before_each)
    samples = timer.sample(steps_to_profile(limits), budget_s)
    costs = fit_costs(samples)
    error = fit_error(costs, samples)
    log.info(
        "profiled %d steps in %.1f s; costs fit them within %.1f %% on average",
        len(samples),
        time.perf_counter() - started_s,
        100 * error,
    )
    return Profile(costs, error)


def step_costs(
    config: ProfileConfig,
    engine: EngineConfig,
    model: NodeModel,
    runner: Runner,
    before_each: Callable[[], None] = lambda: None,
    measure: Measure = measured_profile,
    *,
    is_awaited: bool = False,
) -> KnownCosts:
    """Read, measure or guess the costs, as the config says. Slow, so for a thread.

    Overwrites blocks of the pool. `before_each` is called before each measured step, and may raise
    to stop the profiling. `is_awaited`: requests wait, so that any profile is taken that is kept.
    """
    if config.profile == "off":
        return KnownCosts(GUESS)
    folder = cache_folder("profiles")
    limits = step_limits(engine, model)
    key = profile_key(model, limits)
    reads = config.profile == "auto" or is_awaited
    kept = read_profile(folder, key) if folder is not None and reads else None
    if kept is None or (kept.error > POOR and not is_awaited):
        new = measure(limits, runner, config.profile_s, before_each)
        if kept is None or new.error < kept.error:
            kept = new
            if folder is not None:
                write_profile(folder, key, kept)
    if kept.error > POOR:
        log.warning("the machine was too busy to profile well: the next start will try again")
    if kept.error > USELESS:
        known = KnownCosts(GUESS)
    elif folder is None:
        known = KnownCosts(kept.costs)
    else:
        known = KnownCosts(kept.costs, partial(doubt_profile, folder, key, kept))
    _log_costs(PerfModel(known.costs), limits)
    return known


def _log_costs(perf: PerfModel, limits: StepLimits) -> None:
    log.info(
        "steps: %.2f ms for a token, %.2f ms for a prompt of %d; %d tokens saturate",
        1e3 * perf.decode_s(1, 1),
        1e3 * perf.prefill_s(limits.token_budget, 0, limits.token_budget),
        limits.token_budget,
        perf.saturating_tokens(limits.token_budget),
    )


def profile_key(model: NodeModel, limits: StepLimits) -> ProfileKey:
    """The cache key of this node's profile."""
    return ProfileKey(
        model=_shape(model),
        device=device_name(model.device),
        dtype=model.layout.dtype.value,
        threads=torch.get_num_threads(),
        tensor_parallel=model.share.parallelism.tensor,
        pipeline_parallel=model.share.parallelism.pipeline,
        attention=attention_name(model.device),
        software=f"pdserve {pdserve.__version__}, torch {torch.__version__}",
        token_budget=limits.token_budget,
        max_batch_size=limits.max_batch_size,
        block_size=limits.block_size,
        longest=limits.longest,
    )


def _shape(model: NodeModel) -> str:
    """Return what the times of a model's steps depend on, as a digest."""
    config = dataclasses.replace(model.config, eos_token_ids=frozenset())
    arithmetic = model.arithmetic.removeprefix(model.checkpoint.revision)
    facts = repr((config, model.weights, arithmetic, model.kernels))
    return hashlib.sha256(facts.encode()).hexdigest()


def attention_name(device: torch.device) -> str:
    """What computes attention on a device: on CPUs, the kernels' build."""
    if device.type == "cpu":
        return f"native-{_native.kernel_variants()[0]}"
    from pdserve.engine.cuda.attention.catalog import choose_kind  # only where a GPU is asked for

    return choose_kind("", None).name
