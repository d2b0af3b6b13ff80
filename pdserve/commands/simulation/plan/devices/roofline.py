"""What a node would take that nobody has measured: a calibration from data sheets.

A step of n tokens takes as long as reading its weights and multiplying by them, each at a share of
what the data sheet promises, as in DistServe's model; besides, the ranks of a stage meet twice in a
layer, and a layer's kernels have to be started. Attention adds a term a pair of query and key, and
one a token of context, as in all calibrations.

Fewer bits save bytes, and no arithmetic: integers of 16 bits are multiplied as two bytes, at twice
the rate of bfloat16 on all these GPUs, and fp8 becomes bfloat16. But activations are made integers.

The shares are the same for all devices. They were chosen to fit the only published costs of steps
that come with pdserve, those of `a100-13b`: to a few percent, which a test computes anew. What they
are off by elsewhere is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec

from pdserve.commands.simulation.plan.devices.catalogue import Device
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.plan.forms import FORMS, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.plan.sizes import bytes_read, packed_bytes, row_weights, weight_bytes
from pdserve.engine.ranks.shard import Shard, check_ranks
from pdserve.engine.ranks.sizes import Parallelism
from pdserve.engine.steps.worst import LEAST_PART, LargestStep
from pdserve.kv import KvDtype, KvLayout
from pdserve.kv.companions import windows_worth_it
from pdserve.measured.calibration import (
    Calibration,
    HeldOutErrors,
    ModelShape,
    NodeLimits,
    Range,
    Ranges,
)
from pdserve.node.memory.device_budget import step_bytes
from pdserve.node.start.sizing import sizes_of
from pdserve.protocol import StepCosts, TransferCosts
from pdserve.settings.config import EngineConfig
from pdserve.shared.errors import ConfigError

BANDWIDTH_SHARE: Final = 0.7  # of a data sheet's that steps reach
ARITHMETIC_SHARE: Final = 0.8
ATTENTION_SHARE: Final = 0.3  # of its arithmetic, in attention
LAYER_S: Final = {"cuda": 20e-6, "cpu": 5e-6}  # to start a layer's kernels
INTEGERS_S: Final = {"cuda": 8e-6, "cpu": 0.0}  # those that make integers of what it multiplies
MEETING_S: Final = {"cuda": 10e-6, "cpu": 10e-6}  # of the ranks of a stage, besides what they send
FIT: Final = "fitted to published costs of a 13B model on A100 (within 5%); unknown elsewhere"
_LARGEST: Final = {"cuda": LargestStep(4096, 512), "cpu": LargestStep(512, 64)}
_BLOCK_SIZE: Final = {"cuda": 16, "cpu": 64}
_UTILIZATION: Final = 0.9  # share of the memory that a node takes
_ACTIVATIONS: Final = ActivationDtype.BFLOAT16
_PULL_S: Final = 1e-3
_PART_ROWS: Final = {"cuda": LEAST_PART, "cpu": 128}  # on which stages work one after the other


@dataclass(frozen=True, slots=True)
class NodeType:
    """What a node is made of, and in what form it has a model."""

    device: Device
    ranks: int = 1  # of a stage
    stages: int = 1
    weights: str = "bfloat16"  # a form
    kv: KvDtype = KvDtype.BFLOAT16

    @property
    def num_devices(self) -> int:
        """Devices of a node."""
        return self.ranks * self.stages

    @property
    def is_as_stored(self) -> bool:
        """Whether nothing is rounded to fewer bits than checkpoints have."""
        return self.weights == "bfloat16" and not self.kv.is_coded

    @property
    def text(self) -> str:
        """For people: "4 x H100 80GB", "EPYC 9654, int8, KV int8"."""
        words = [self.device.name]
        if self.num_devices > 1:
            words = [f"{self.num_devices} x {self.device.name}"]
        if self.stages > 1:
            words[0] += f" ({self.stages} stages)"
        if self.weights != "bfloat16":
            words.append(self.weights)
        if self.kv.is_coded:
            words.append(f"KV {self.kv}")
        return ", ".join(words)


def calibration_of(
    model: ModelConfig, name: str, node: NodeType, max_model_len: int
) -> Calibration:
    """Return what such a node would be measured to take.

    Raises:
        ConfigError: the model cannot be divided so, or does not fit; says what is lacking.
    """
    device, kind = node.device, node.device.kind
    check_ranks(model, Parallelism(node.ranks, node.stages))
    form = FORMS[node.weights]
    sizes_of(_engine(node), model, kind)  # refuses what this kind of device does not compute
    largest = _LARGEST[kind]
    windows = windows_worth_it(model.sliding_windows, max_model_len) if kind == "cpu" else ()
    layout = model.kv_layout(_BLOCK_SIZE[kind], node.kv)
    part = max(layout.parts(node.ranks, node.stages), key=lambda each: each.block_bytes)
    weights = _largest_part(model, node)
    left = int(_UTILIZATION * device.memory_bytes) - weights
    left -= step_bytes(
        model,
        _ACTIVATIONS,
        largest,
        Shard(0, node.ranks, 0, node.stages),
        has_graphs=kind == "cuda",
        has_codes=form.is_coded,
    )
    num_blocks = left // (part.block_bytes * (1 + bool(windows)))
    if part.tokens_in(max(0, num_blocks - part.state_blocks)) < max_model_len:
        raise ConfigError(
            f"weights take {weights / 1e9:.3g} GB of each {device.name}'s "
            f"{device.memory_bytes / 1e9:.3g} GB, and what is left has no room for the KV of "
            f"{max_model_len} tokens"
        )
    costs = step_costs(model, node, part, largest.num_tokens)
    return Calibration(
        date="from data sheets",
        device=node.text,
        device_type=kind,
        cpus=device.cores * node.num_devices,
        model=name,
        shape=ModelShape(
            layers=layout.num_layers,
            hidden=model.hidden_size,
            kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            vocab=model.vocab_size,
            dtype=layout.dtype,
            block_size=layout.block_size,
            weight_bytes=weights * node.num_devices,
            is_latent=layout.is_latent,
            windows=windows,
            state_bytes=layout.state_bytes,
        ),
        limits=NodeLimits(
            num_blocks=num_blocks,
            token_budget=largest.num_tokens,
            max_batch_size=largest.num_requests,
            max_model_len=max_model_len,
        ),
        tensor_parallel=node.ranks,
        pipeline_parallel=node.stages,
        quantisation=form.name if form.is_quantised else "",
        prefill=costs,
        decode=costs,
        mixed=costs,
        pull=TransferCosts("ucx", _PULL_S, device.network_bytes_per_s),
        ranges=Ranges(
            Range(1, max_model_len), Range(1, largest.num_requests), Range(1, max_model_len)
        ),
        errors=HeldOutErrors(None, None, None, None),
    )


def step_costs(model: ModelConfig, node: NodeType, part: KvLayout, budget: int) -> StepCosts:
    """Return what steps of such a node take, of up to so many tokens; `part`: KV of one rank."""
    device, ranks, stages = node.device, node.ranks, node.stages
    read_s = 1 / (BANDWIDTH_SHARE * device.bytes_per_s * ranks)  # a byte
    flop_s = 1 / (ARITHMETIC_SHARE * device.flops_per_s * ranks)
    work = _work(model, node.weights, budget)
    knots = sorted(work)
    form_s = INTEGERS_S[device.kind] * (node.weights in ("int8", "int4"))
    layer_s = (LAYER_S[device.kind] + form_s) * model.num_layers
    times = []
    for num_tokens in knots:
        num_bytes, num_flops = work[num_tokens]
        whole_s = num_bytes * read_s + num_flops * flop_s
        whole_s += layer_s + _meetings_s(model, node, num_tokens)
        times.append(whole_s * _overlap(num_tokens, node))
    pairs = 2 * model.pair_dim * model.num_heads * len(model.kv_layers)
    return StepCosts(
        knots,
        _ascending(times),
        sampled_s=2 * model.vocab_size * model.hidden_size * flop_s,
        pair_s=pairs / (ATTENTION_SHARE * device.flops_per_s * ranks),
        context_s=part.token_bytes * stages / (BANDWIDTH_SHARE * device.bytes_per_s),
    )


def _engine(node: NodeType) -> EngineConfig:
    said = {
        "dtype": str(_ACTIVATIONS),
        "quantization": FORMS[node.weights].quantization,
        "kv_dtype": str(node.kv) if node.kv.is_coded else "auto",
    }
    return msgspec.convert(said, EngineConfig)


@lru_cache(maxsize=64)
def _work(model: ModelConfig, weights: str, budget: int) -> dict[int, tuple[int, int]]:
    """Tokens of a step |-> (bytes of weights it reads, FLOPs), but for attention and the head's."""
    plan = ModelPlan.of(model, form=FORMS[weights])
    assert plan.lm_head is not None, "it is the whole model"
    flops = 2 * sum(row_weights(layer) for layer in plan.layers)
    counts = [1 << exponent for exponent in range(budget.bit_length())]
    return {
        count: (
            sum(bytes_read(layer, count) for layer in plan.layers) + plan.lm_head.num_bytes,
            flops * count,
        )
        for count in counts
    }


def _largest_part(model: ModelConfig, node: NodeType) -> int:
    """Return the bytes of the weights of the fullest rank."""
    shards = [Shard(0, node.ranks, stage, node.stages) for stage in range(node.stages)]
    plans = [ModelPlan.of(model, shard, FORMS[node.weights]) for shard in shards]
    size = packed_bytes if node.device.kind == "cpu" else weight_bytes
    return max(size(plan, _ACTIVATIONS) for plan in plans)


def _meetings_s(model: ModelConfig, node: NodeType, num_tokens: int) -> float:
    """Two sums over the ranks in each layer, and what a stage hands to the next."""
    device, row_bytes = node.device, model.hidden_size * _ACTIVATIONS.itemsize
    handed_s = num_tokens * row_bytes / device.network_bytes_per_s + MEETING_S[device.kind]
    total_s = (node.stages - 1) * handed_s
    if node.ranks > 1:
        sent = 2 * (node.ranks - 1) / node.ranks * num_tokens * row_bytes
        each_s = sent / device.link_bytes_per_s + MEETING_S[device.kind]
        total_s += 2 * model.num_layers * each_s
    return total_s


def _overlap(num_tokens: int, node: NodeType) -> float:
    """Return the share of a step's work that is not done by several stages at a time."""
    rows, stages = _PART_ROWS[node.device.kind], node.stages
    parts = max(1, num_tokens // rows)
    return (parts + stages - 1) / (parts * stages)


def _ascending(times: list[float]) -> list[float]:
    """Never less for more tokens: with stages, a step of one more part may be over earlier."""
    most, found = 0.0, []
    for seconds in times:
        most = max(most, seconds)
        found.append(most)
    return found
