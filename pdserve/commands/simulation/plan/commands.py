"""What starts the deployment that a plan chose: commands, and values of the Helm chart.

Nodes have the device, the threads, the limits and the policies of those that were simulated, KV
included, and requests the promise, to which policies keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote
from typing import Final

from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.simulation.predict.deployment import Deployment
from pdserve.measured.calibration import Calibration
from pdserve.settings.config import PolicyConfig
from pdserve.settings.described import settings_of

_CLASS: Final = "planned"  # of all requests


def commands(
    deployment: Deployment, calibration: Calibration, promise: Promise, policy: PolicyConfig
) -> list[str]:
    """Return what starts it on one machine, and process by process on several.

    MODEL stands for the checkpoint that was calibrated, and ADDRESS for the coordinator's.
    """
    mode, pools = f"--mode {deployment.mode} --model MODEL", _pools(deployment)
    promised = promise_flags(promise)
    settings = {**_engine(calibration, deployment), **_policies(policy)}
    of_nodes = " ".join(f"--set {name}={value}" for name, value in settings.items())
    numbers = " ".join(f"--{role} {number}" for role, number in pools.items())
    return [
        f"pdserve up {mode} {numbers} {promised} {of_nodes}",
        f"pdserve coordinator {mode} {promised}",
        *(
            f"pdserve {role} --model MODEL --coordinators ADDRESS {of_nodes}"
            f"  # on {number} machines"
            for role, number in pools.items()
        ),
    ]


def helm_values(
    deployment: Deployment, calibration: Calibration, promise: Promise, policy: PolicyConfig
) -> dict[str, object]:
    """Return the values of the chart for this deployment, but for the model."""
    settings = {**_engine(calibration, deployment), **_policies(policy)}
    device = settings.pop("engine.device")  # these have values of their own
    parts = {
        "tensorParallel": settings.pop("engine.tensor_parallel", 1),
        "pipelineParallel": settings.pop("engine.pipeline_parallel", 1),
    }
    changed: dict[str, object] = {name: number for name, number in parts.items() if number != 1}
    if threads := settings.get("engine.threads"):
        changed["resources"] = {"requests": {"cpu": str(threads)}}
    promised = {"routing.slo_classes": [_promised(promise)], "routing.default_class": _CLASS}
    return {
        "mode": deployment.mode,
        "coordinator": {"settings": promised},
        **{
            role: {"replicas": number, "device": device, "settings": settings, **changed}
            for role, number in _pools(deployment).items()
        },
    }


def _pools(deployment: Deployment) -> Mapping[str, int]:
    """Return the nodes of each pool that there is."""
    if deployment.mode == "colocated":
        return {"decode": deployment.num_nodes}
    return {"prefill": deployment.prefill, "decode": deployment.decode}


def _promised(promise: Promise) -> str:
    return f"{_CLASS} ttft={promise.ttft_s:.6g} tpot={promise.tpot_s:.6g}"


def promise_flags(promise: Promise) -> str:
    """Return the flags of a coordinator with which all requests have this promise."""
    return f"--slo-classes {quote(_promised(promise))} --set routing.default_class={_CLASS}"


def _engine(calibration: Calibration, deployment: Deployment) -> dict[str, object]:
    """Return the settings of the engine that was calibrated, for nodes of both roles."""
    other = deployment.prefill_weights
    of_role = {"engine.prefill_quantization": other} if other else {}
    return engine_settings(calibration) | of_role


def engine_settings(calibration: Calibration) -> dict[str, object]:
    """Return the settings of the engine that was calibrated."""
    limits, shape = calibration.limits, calibration.shape
    parts = {
        "engine.tensor_parallel": calibration.tensor_parallel,
        "engine.pipeline_parallel": calibration.pipeline_parallel,
    }
    return {
        "engine.device": calibration.device_type,
        "engine.kv_memory": str(_kv_bytes(calibration)),
        "engine.max_model_len": limits.max_model_len,
        "engine.max_batch_size": limits.max_batch_size,
        "engine.token_budget": limits.token_budget,
        "engine.block_size": shape.block_size,
        "engine.kv_dtype" if shape.dtype.is_coded else "engine.dtype": str(shape.dtype),
        # Else a node has as many threads as its machine has cores. On GPUs, they compute no steps.
        **({"engine.threads": calibration.cpus} if calibration.device_type == "cpu" else {}),
        **({"engine.quantization": calibration.quantisation} if calibration.quantisation else {}),
        **{name: number for name, number in parts.items() if number > 1},
    }


def weights_by_role(prefill: Calibration, decode: Calibration) -> dict[str, object]:
    """Return the settings by which all nodes know both forms of weights, if they differ."""
    if prefill.quantisation == decode.quantisation:
        return {}
    return {
        "engine.prefill_quantization": prefill.quantisation or "none",
        "engine.quantization": decode.quantisation or "none",
    }


def _policies(policy: PolicyConfig) -> dict[str, object]:
    """Return the settings of the policies that are not those of any node."""
    settings = [(setting, setting.of(policy)) for setting in settings_of(PolicyConfig)]
    return {f"policy.{s.name}": value for s, value in settings if value != s.default}


def _kv_bytes(calibration: Calibration) -> int:
    """Return the memory of which a node makes as many blocks: on GPUs, the largest part decides."""
    layout, num_blocks = calibration.shape.layout, calibration.limits.num_blocks
    if calibration.device_type == "cpu":
        return num_blocks * (1 + layout.num_companions) * layout.block_bytes
    parts = layout.parts(calibration.tensor_parallel, calibration.pipeline_parallel)
    return num_blocks * len(parts) * max(part.block_bytes for part in parts)
