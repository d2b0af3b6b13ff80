"""What every answer begins with: the calibration, the promises, and how far to trust them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import msgspec

from pdserve.commands.bench.compare.cases import CompareCase
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.simulation.predict.config import PredictConfig
from pdserve.commands.simulation.predict.deployment import Deployment, Rig, idle_latencies
from pdserve.commands.simulation.predict.load import Question, Ranged
from pdserve.measured.calibration import Calibration, HeldOutErrors, read_calibration
from pdserve.shared.errors import CalibrationError, ConfigError

_IDLE_REQUESTS = 20


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """The accuracy card: what an answer rests on."""

    calibration: str
    date: str
    device: str
    model: str
    errors: HeldOutErrors  # |predicted / measured - 1| of steps, None where nobody has measured it
    outside: dict[str, tuple[int, int]]  # what was not calibrated |-> least and most of it

    @property
    def text(self) -> str:
        """For people, in a few lines."""
        lines = [
            f"calibration {self.calibration}: {self.device}, {self.model}, {self.date}",
            f"held-out errors of its step times: {said_errors(self.errors)}",
        ]
        lines += [
            f"OUTSIDE the calibration: {what} from {least} to {most}"
            for what, (least, most) in self.outside.items()
        ]
        return "\n".join(lines)


def said_errors(errors: HeldOutErrors) -> str:
    """For people: "prefill 3.1%, decode unknown, ..."."""
    shares = msgspec.to_builtins(errors)
    return ", ".join(f"{k} {'unknown' if v is None else f'{v:.1%}'}" for k, v in shares.items())


def load_calibration(name: str) -> Calibration:
    """Read a built-in calibration or a file.

    Raises:
        CalibrationError: there is no such thing.
    """
    folder = Path(str(files("pdserve.commands.simulation") / "calibrations"))
    built_in = {file.stem: file for file in folder.glob("*.json")}
    if name not in built_in and not Path(name).exists():
        raise CalibrationError(
            f"there is no calibration file {name}; built in are {', '.join(sorted(built_in))}"
        )
    return read_calibration(built_in.get(name, Path(name)))


def question_of(config: PredictConfig) -> Question:
    """Return the load that these settings describe."""
    return Question(config.trace, config.scenario, config.length_scale, config.requests)


def rig_of(config: PredictConfig, calibration: Calibration, *, admission: bool) -> Rig:
    """Return what all simulations with these settings have in common.

    Raises:
        CalibrationError: the calibration of prefill nodes cannot be read, or is of another model.
    """
    prefill = None
    if config.prefill_calibration:
        prefill = load_calibration(config.prefill_calibration)
        _check_pair(prefill, calibration)
    return Rig(
        calibration=calibration,
        policy=config.policy,
        ranges=Ranged(calibration, extrapolates=config.extrapolate, prompts_of=prefill),
        one_host=config.one_host,
        admission=admission,
        target=config.target,
        prefill=prefill,
    )


def _check_pair(prefill: Calibration, decode: Calibration) -> None:
    """Raises CalibrationError: nodes of the two are not the prefill and decode nodes of a model."""
    if prefill.model != decode.model or prefill.shape.layout != decode.shape.layout:
        raise CalibrationError(
            f"prefill nodes were calibrated with {prefill.model}, and decode nodes with "
            f"{decode.model}, or with other KV: calibrate both with one model and one --kv-dtype"
        )
    if prefill.quantisation == decode.quantisation:
        raise CalibrationError(
            f"both calibrations are of quantization {decode.quantisation or 'none'}: calibrate "
            "prefill nodes with another one, or leave --prefill-calibration out"
        )


def card_of(config: PredictConfig, rig: Rig) -> Card:
    """Return the card for an answer that was found with this rig."""
    made = rig.calibration
    return Card(
        calibration=config.calibration,
        date=made.date,
        device=made.device,
        model=made.model,
        errors=made.errors,
        outside=rig.ranges.outside,
    )


def promise_of(
    config: PredictConfig, rig: Rig, case: CompareCase, deployments: Sequence[Deployment]
) -> Promise:
    """Return the targets: as given, or multiples of the best idle latencies, as in bench compare.

    Raises:
        ConfigError: no TPOT was given, and answers are too short to have one.
    """
    ttft_s, tpot_s = config.ttft_s, config.tpot_s
    if ttft_s and tpot_s:
        return Promise(ttft_s, tpot_s)
    idle = [idle_latencies(rig, d, case, _IDLE_REQUESTS, 0) for d in deployments]
    ttft_s = ttft_s or case.ttft_scale * min(slowest_s for slowest_s, _ in idle)
    tpot_s = tpot_s or case.tpot_scale * min(median_s for _, median_s in idle)
    if not tpot_s:
        raise ConfigError(f"{case.name}: most answers are one token long; give --tpot-s")
    return Promise(ttft_s, tpot_s)
