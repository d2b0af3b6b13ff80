"""The answer of `pdserve plan --devices`: sized by arithmetic, then simulated if it can be."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from math import ceil, floor
from pathlib import Path
from typing import Final

import msgspec

from pdserve.commands.bench.checkpoints.model_config import model_named
from pdserve.commands.bench.compare.cases import CompareCase
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.bench.load.scenarios import Lengths, RequestKind, Scenario
from pdserve.commands.bench.load.workload import SyntheticWorkload
from pdserve.commands.simulation.plan.commands import (
    engine_settings,
    promise_flags,
    weights_by_role,
)
from pdserve.commands.simulation.plan.config import PlanConfig
from pdserve.commands.simulation.plan.devices.catalogue import Device, device_named
from pdserve.commands.simulation.plan.devices.plot import save_plot
from pdserve.commands.simulation.plan.devices.search import (
    Architecture,
    Choice,
    Compared,
    compare,
)
from pdserve.commands.simulation.plan.devices.sizing import Load
from pdserve.commands.simulation.predict.deployment import Deployment, Rig, run
from pdserve.commands.simulation.predict.load import Ranged
from pdserve.shared.costs import price_in
from pdserve.shared.errors import ConfigError

_GROWTH: Final = 1.1  # of the nodes, if a simulation says that they are too few
_ROUNDS: Final = 6  # of that
_LEAST_LEN: Final = 4096  # tokens that a request may have at least, whatever the load's have


class Simulated(msgspec.Struct, frozen=True):
    """What a simulation said of a choice, or of a slice of it."""

    slice: str  # "1P2D at 12/s"
    attainment: float


class Row(msgspec.Struct, frozen=True):
    """The cheapest of one architecture: of the model as it is stored, or in fewer bits."""

    architecture: Architecture
    nodes: str
    price: float  # an hour
    off_by: float  # 0: as it is stored; else see rounding.UNIT
    is_chosen: bool
    limits: list[str]  # of each pool: why it is not smaller
    simulated: Simulated
    commands: list[str]


class DevicesReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    model: str
    rate: float
    prompt: int  # tokens
    output: int
    promise: Promise
    target: float
    chosen: Architecture | None
    why: str
    rows: list[Row]
    lacking: Mapping[Architecture, str]
    plot: str  # file; empty: none
    seconds: float  # that the answer took


def answer(config: PlanConfig) -> DevicesReport:
    """Make the plan.

    Raises:
        ConfigError: a device, a price, the lengths or the model are not known, or do not fit.
    """
    began_s = time.perf_counter()
    model, load = model_named(config.model), _load(config)
    most = load.prompt + load.output
    if most > model.max_model_len:
        raise ConfigError(
            f"--lengths: {most} tokens are more than the {model.max_model_len} of {config.model}"
        )
    devices = [device_named(name) for name in config.devices]
    longest = min(model.max_model_len, max(_LEAST_LEN, most))
    compared = compare(model, config.model, devices, _prices(config, devices), load, longest)
    found = [_simulated(config, choice, load) for choice in compared.choices]
    best, rounded = (
        {one.architecture: one for one, _ in found if one.is_as_stored is as_stored}
        for as_stored in (True, False)
    )
    compared = replace(compared, best=best, rounded=rounded)
    chosen = compared.chosen
    if chosen is not None and config.plot:
        save_plot(chosen, load, Path(config.plot))
    return DevicesReport(
        model=config.model,
        rate=load.rate,
        prompt=load.prompt,
        output=load.output,
        promise=load.promise,
        target=load.target,
        chosen=None if chosen is None else chosen.architecture,
        why=_why(compared, chosen),
        rows=[_row(choice, simulated, load.promise, chosen) for choice, simulated in found],
        lacking=compared.lacking,
        plot=config.plot if chosen is not None else "",
        seconds=time.perf_counter() - began_s,
    )


def _load(config: PlanConfig) -> Load:
    if not config.rate:
        raise ConfigError("--rate: how many requests per second are to be served?")
    if not (config.ttft_s and config.tpot_s):
        raise ConfigError("--ttft-s and --tpot-s: devices are planned for a promise of both")
    prompt, _, output = config.lengths.partition(":")
    if not (prompt.isdecimal() and output.isdecimal() and int(prompt) and int(output)):
        raise ConfigError(
            f"--lengths {config.lengths!r}: write PROMPT:OUTPUT, the tokens of a request, as in "
            "3000:400"
        )
    promise = Promise(config.ttft_s, config.tpot_s)
    return Load(config.rate, int(prompt), int(output), promise, config.target)


def _prices(config: PlanConfig, devices: list[Device]) -> dict[str, float]:
    """Return what an hour of each costs: as assumed, or as told by its short name."""
    prices = {device.name: device.price for device in devices}
    for text in config.price:
        name, price = price_in(text)
        if not price:
            raise ConfigError(f"--price {text!r}: write DEVICE=AMOUNT, with an amount above 0")
        prices[device_named(name).name] = price
    return prices


def _simulated(config: PlanConfig, choice: Choice, load: Load) -> tuple[Choice, Simulated]:
    """Simulate a choice, or what of it is no larger than allowed; with more nodes if it has to be.

    Chances even out among many nodes: a slice keeps its promises less well than the whole.
    """
    for _ in range(_ROUNDS):
        result = _slice(config, choice, load)
        if result.attainment >= load.target:
            break
        grown = tuple(
            (sized, msgspec.structs.replace(pool, count=ceil(_GROWTH * pool.count)))
            for sized, pool in choice.pools
        )
        price = choice.price * sum(p.count for _, p in grown) / choice.num_nodes
        choice = msgspec.structs.replace(choice, pools=grown, price=price)
    return choice, result


def _slice(config: PlanConfig, choice: Choice, load: Load) -> Simulated:
    share = min(1.0, config.max_nodes / choice.num_nodes)
    counts = [max(1, floor(pool.count * share)) for _, pool in choice.pools]
    rate = load.rate * min(
        count / pool.count for count, (_, pool) in zip(counts, choice.pools, strict=True)
    )
    first, last = choice.pools[0][0].calibration, choice.pools[-1][0].calibration
    if len(counts) == 1:
        deployment = Deployment("colocated", 0, counts[0])
    else:
        other = "" if first is last else first.device
        deployment = Deployment("disaggregated", counts[0], counts[1], prefill_weights=other)
    rig = Rig(
        calibration=last,
        policy=config.policy,
        ranges=Ranged(last, extrapolates=True, prompts_of=first),
        one_host=False,
        admission=config.admission,
        target=load.target,
        prefill=first,
    )
    case = _case(load)
    count = case.count_at(rate, config.requests, load.output * load.promise.tpot_s)
    result = run(rig, deployment, case, rate, count, load.promise, 0)
    return Simulated(f"{deployment.text} at {rate:.3g}/s", result.point.attainment)


def _case(load: Load) -> CompareCase:
    """Requests that are all of one size, at random times."""
    prompt, output = (Lengths(n, 0.0, n, n) for n in (load.prompt, load.output))
    scenario = Scenario(
        name="lengths",
        shows=f"{load.prompt} tokens in, {load.output} out",
        kinds=(RequestKind("request", 1, prompt, output),),
        ttft_scale=1.0,
        tpot_scale=1.0,
    )
    return CompareCase(
        name=scenario.name,
        shows=scenario.shows,
        workload=SyntheticWorkload(scenario, 0),
        ttft_scale=1.0,
        tpot_scale=1.0,
        deck=1,
        length_factor=1.0,
        scenario=scenario,
    )


def _row(choice: Choice, simulated: Simulated, promise: Promise, chosen: Choice | None) -> Row:
    return Row(
        choice.architecture,
        choice.text,
        choice.price,
        choice.off_by,
        choice is chosen,
        [pool.limit for _, pool in choice.pools],
        simulated,
        commands(choice, promise),
    )


def commands(choice: Choice, promise: Promise) -> list[str]:
    """Return what starts the pools of a choice."""
    mode = "colocated" if len(choice.pools) == 1 else "disaggregated"
    lines = [f"pdserve coordinator --mode {mode} {promise_flags(promise)}"]
    first, last = choice.pools[0][0].calibration, choice.pools[-1][0].calibration
    declared = weights_by_role(first, last)  # to all nodes: the pair is the revision
    for sized, pool in choice.pools:
        role = "decode" if pool.what == "both" else pool.what
        settings = engine_settings(sized.calibration) | declared
        words = " ".join(f"--set {name}={value}" for name, value in settings.items())
        lines.append(
            f"pdserve {role} --model MODEL --coordinators ADDRESS {words}  # {pool.count} times"
        )
    return lines


def _why(compared: Compared, chosen: Choice | None) -> str:
    """Return which constraint decided."""
    if chosen is None:
        return "none serves the load"
    said = [f"{name} cannot ({why})" if why else "" for name, why in compared.lacking.items()]
    said += [
        f"{choice.architecture} costs {choice.price:.4g}"
        + (f" in fewer bits, off by {choice.off_by:.3g}" if not choice.is_as_stored else "")
        for choice in compared.choices
        if choice is not chosen
    ]
    limits = "; ".join(f"{pool.what}: {pool.limit}" for _, pool in chosen.pools)
    return "; ".join([*filter(None, said), f"its size: {limits}"])
