"""From config and checkpoint to a model runner: every "auto" is resolved here, and logged."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from pdserve import _native
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.engine.drafts.heads.eagle3 import HeadPlan
from pdserve.engine.drafts.heads.mtp import MtpPlan
from pdserve.engine.grammar import GrammarCompiler, GrammarProgress
from pdserve.engine.kv.cache import DeviceBuffer, KvCache
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.config import ModelConfig, load_model_config
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.quantised.config import weights_described
from pdserve.engine.native.choice import KernelChoice, choose_kernels
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.plan.forms import ActivationDtype, WeightForm
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.plan.sizes import packed_bytes, weight_bytes
from pdserve.engine.ranks.hosts import WHOLE_NODE, HostShare
from pdserve.engine.ranks.shard import WHOLE, Shard, check_ranks
from pdserve.engine.ranks.sizes import Parallelism
from pdserve.engine.steps.worst import ANY_STEP, LargestStep
from pdserve.engine.weights.codings import device_plan, native_plan, stored_as
from pdserve.engine.weights.load import load_decoder
from pdserve.engine.weights.packing import multiplied_as, packing
from pdserve.grammar import load_vocabulary
from pdserve.kv import KvLayout
from pdserve.kv.companions import windows_worth_it
from pdserve.model_files.checkpoint import Checkpoint, resolve_checkpoint
from pdserve.model_files.end_tokens import described, end_tokens
from pdserve.node.memory.device_budget import gpu_kv_bytes, step_bytes
from pdserve.node.start.cores import CorePlan, plan_cores, use_compute_cores, use_service_cores
from pdserve.node.start.precision import Precision, engine_of, precision_of
from pdserve.node.start.prefetch import weights_folder
from pdserve.node.start.sizing import Sizes, cpu_kv_bytes, place_kv_bytes, sizes_of
from pdserve.protocol import NodeRole
from pdserve.settings.config import AttentionName, EngineConfig, NodeConfig
from pdserve.settings.speculation import draft_model
from pdserve.settings.values import parse_bytes
from pdserve.shared.errors import ConfigError

log = logging.getLogger(__name__)

WARMUP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class NodeModel:
    """The model that a node will serve, as known before any weight is read."""

    checkpoint: Checkpoint
    config: ModelConfig
    device: torch.device
    layout: KvLayout
    num_blocks: int
    max_model_len: int  # prompt and output tokens
    form: WeightForm  # of matrices
    activations: ActivationDtype
    attention: AttentionName = "auto"
    has_graphs: bool = True
    kernels: KernelChoice | None = None  # None: not on a CPU
    share: HostShare = WHOLE_NODE  # what this host has of it
    worst_step: LargestStep = ANY_STEP
    # What guesses for it: a smaller model, or a head.
    draft: NodeModel | HeadPlan | MtpPlan | None = None
    weights: str = ""  # what they are stored as, and what they are computed with as, for people
    precision: Precision | None = None  # by role; None: all nodes have the same
    has_codes: bool = False  # of the checkpoint, that are multiplied as they are

    @property
    def has_device_ranks(self) -> bool:
        """Whether each rank has a device, and KV, of its own; ranks on CPUs share one pool."""
        return self.kernels is None and not self.share.is_alone

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Layers before which a head has rows copied out."""
        return self.draft.config.taps if isinstance(self.draft, HeadPlan) else ()

    @property
    def num_whole_blocks(self) -> int:
        """Of the pool's blocks, how many there are with companions."""
        return self.layout.whole_blocks(self.num_blocks)

    @property
    def rank_layouts(self) -> list[KvLayout]:
        """The layouts of the pool's parts, of which only ranks with devices have several.

        There is one for each rank of the node, those of other hosts included.
        """
        if not self.has_device_ranks:
            return [self.layout]
        parallelism = self.share.parallelism
        return self.layout.parts(parallelism.tensor, parallelism.pipeline)

    @property
    def parts_here(self) -> range:
        """Which of them this host has."""
        return self.share.ranks if self.has_device_ranks else range(1)

    @property
    def part_sizes(self) -> list[int]:
        """Bytes of a block in each of those."""
        layouts = self.rank_layouts
        return [layouts[number].block_bytes for number in self.parts_here]

    def device_of_rank(self, rank: int) -> torch.device:
        """The GPU of a rank of this host: they are in a row, from the first one's on."""
        return device_of_rank(self.device, rank)

    def plan(self, shard: Shard = WHOLE) -> ModelPlan:
        """What a rank has of the model."""
        return _plan(self.checkpoint, self.config, self.form, self.device, shard)

    @property
    def first_layer(self) -> int:
        """The first layer of the model that the pool has."""
        return self.share.first_layer(self.config)

    @property
    def revision(self) -> str:
        """What KV depends on: as `arithmetic`, but for the kernels of each role, if they differ."""
        if self.precision is None:
            return self.arithmetic
        return "+".join([self.checkpoint.revision, self.precision.name, *self._kv_codes])

    @property
    def arithmetic(self) -> str:
        """What steps of this node depend on: weights, as quantized; codes of KV; its kernels."""
        parts = [self.checkpoint.revision]
        if self.form.is_quantised:
            parts.append(self.form.name)
        parts += self._kv_codes
        if self.kernels is not None:
            parts.append(self.kernels.digest)
        elif self.has_codes:
            parts.append("integers")
        return "+".join(parts)

    @property
    def _kv_codes(self) -> list[str]:
        layout = self.layout
        stored = [f"kv-{layout.dtype}"] if layout.dtype.is_coded else []
        return stored + [f"wire-{layout.rounded_to}"] * (layout.rounded_to is not None)


class RankLoader(Protocol):
    """Loads a model that several ranks compute together: `ranks.Ranks`, or `DeviceRanks`."""

    def load(
        self, model: NodeModel, on_progress: Callable[[float], None], cache: PackedCache | None
    ) -> Decoder:
        """Load this rank's share, and wait for the others. Raises as load_runner."""
        ...


def plan_model(config: NodeConfig, role: NodeRole = NodeRole.DECODE) -> NodeModel:
    """Resolve the checkpoint, and size the KV pool; `role`: decides where weights are by role.

    Raises:
        ConfigError, ModelError: it cannot be served as asked.
        KvBudgetTooSmall: the KV budget cannot hold one request; with the numbers.
    """
    engine = engine_of(config.engine, role)
    checkpoint = resolve_checkpoint(
        config.checkpoint.model or str(CHECKPOINT_PATH), config.checkpoint.revision
    )
    model = load_model_config(checkpoint)
    log.info("answers end at %s", described(end_tokens(checkpoint)))
    stored = weights_described(checkpoint)
    device = named_device(engine.device)
    sizes = sizes_of(engine, model, "cpu" if device.type == "cpu" else "cuda")
    layout, max_model_len = sizes.layout, sizes.max_model_len
    share = _share(engine, model, device)
    precision = precision_of(config.engine, role, sizes.activations)
    if model.recurrent is not None:
        by_role = precision is not None
        _check_states(device, share, draft_model(config.speculation), by_role=by_role)
    plan = _plan(checkpoint, model, sizes.form, device)
    budget_bytes = _kv_budget(engine, device, checkpoint, model, sizes, share)
    if config.place.ledger:
        budget_bytes = place_kv_bytes(engine, config.place, packed_bytes(plan, sizes.activations))
    if device.type != "cpu":  # the largest part decides: heads may be replicated, stages uneven
        parts = layout.parts(share.parallelism.tensor, share.parallelism.pipeline)
        most_bytes = len(parts) * max(part.block_bytes for part in parts)
        budget_bytes = budget_bytes * layout.block_bytes // most_bytes
    if device.type == "cpu" and share.is_alone:
        windows = windows_worth_it(model.sliding_windows, max_model_len)
        layout = structs.replace(layout, windows=windows)
    num_blocks = layout.blocks_in_budget(budget_bytes, max_model_len)
    log.info(
        "KV pool: %s; %d blocks in %d MiB = room for %d tokens; max_model_len %d",
        layout.describe(),
        num_blocks,
        budget_bytes >> 20,
        layout.tokens_in(layout.whole_blocks(num_blocks)),
        max_model_len,
    )
    packed = packing(plan, stored_as(checkpoint, model))
    kernels = _kernels(engine, plan, sizes) if device.type == "cpu" else None
    computed = sizes.form.name
    taken = multiplied_as(plan, sizes.activations)
    computed += f", activations as {taken}" if taken != sizes.activations else ""
    weights = (
        f"stored as {stored}; packed: {packed}; KV as {layout.dtype}; computed with as {computed}"
    )
    log.info("weights: %s", weights)
    return NodeModel(
        checkpoint=checkpoint,
        config=model,
        device=device,
        layout=layout,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        form=sizes.form,
        activations=sizes.activations,
        attention=engine.attention,
        has_graphs=engine.cuda_graphs,
        kernels=kernels,
        share=share,
        worst_step=_worst_step(engine),
        weights=weights,
        precision=precision,
        has_codes=bool(plan.coded),
    )


def _plan(
    checkpoint: Checkpoint,
    config: ModelConfig,
    form: WeightForm,
    device: torch.device,
    shard: Shard = WHOLE,
) -> ModelPlan:
    if device.type == "cpu":
        return native_plan(checkpoint, config, form, shard)
    return device_plan(checkpoint, config, form, shard)


def _worst_step(engine: EngineConfig) -> LargestStep:
    return LargestStep(engine.token_budget, engine.max_batch_size)


def _share(engine: EngineConfig, model: ModelConfig, device: torch.device) -> HostShare:
    """Raises ConfigError: the model cannot be divided among the ranks, or not on this device."""
    share = share_of(engine)
    parallelism = share.parallelism
    if device.type == "cpu":
        check_host_stages(share)
    else:
        check_devices(device, share.num_ranks, torch.cuda.device_count())
    check_ranks(model, parallelism)
    return share


def _check_states(device: torch.device, share: HostShare, draft: str, *, by_role: bool) -> None:
    """Raises ConfigError: something asked for is not there for models with states."""
    asked = [
        "pipeline_parallel and rank_hosts" * (share.parallelism.pipeline > 1),
        "tensor_parallel on GPUs" * (share.parallelism.tensor > 1 and device.type != "cpu"),
        "speculation.model" * bool(draft),
        "what is given by role" * by_role,
    ]
    if any(asked):
        raise ConfigError(
            "the model has layers with a state (linear attention), which nodes compute on CPUs of "
            "one host or on one GPU, all alike, without drafts: leave out "
            + ", ".join(filter(None, asked))
        )


def check_host_stages(share: HostShare) -> None:
    """Raises ConfigError: on CPUs, each host has whole stages, and as many as the others."""
    num_stages, num_hosts = share.parallelism.pipeline, 1 + len(share.later_hosts)
    if num_stages % num_hosts:
        raise ConfigError(
            f"pipeline_parallel {num_stages}: on CPUs it must be a multiple of the {num_hosts} "
            "hosts, since the ranks of a stage are on one host"
        )


def check_devices(first: torch.device, num_ranks: int, num_devices: int) -> None:
    """Raises ConfigError: there are too few GPUs."""
    last = device_of_rank(first, num_ranks - 1)
    if last.index < num_devices:
        return
    if num_ranks == 1:
        raise ConfigError(f'device "{last}": there are {num_devices} GPUs, the first is cuda:0')
    raise ConfigError(
        f"{num_ranks} ranks take {device_of_rank(first, 0)} to {last}, and there are {num_devices} "
        "GPUs: lower tensor_parallel or pipeline_parallel, or begin at another --device"
    )


def device_of_rank(first: torch.device, rank: int) -> torch.device:
    """The GPU of a rank, if that of rank 0 is `first`; on CPUs it is the same."""
    return first if first.type == "cpu" else torch.device(first.type, (first.index or 0) + rank)


def _kernels(engine: EngineConfig, plan: ModelPlan, sizes: Sizes) -> KernelChoice:
    try:
        return choose_kernels(
            plan.matrices,
            sizes.activations,
            sizes.form,
            weights_folder(engine),
            engine.kernels,
            has_states=plan.config.recurrent is not None,
        )
    except ValueError as error:
        raise ConfigError(f"kernels {error}") from error


def packed_cache(engine: EngineConfig) -> PackedCache | None:
    """The cache of packed weights; None: there is none.

    Raises:
        ConfigError: packed_limit is not a size.
    """
    folder = weights_folder(engine)
    return None if folder is None else PackedCache(folder, parse_bytes(engine.packed_limit))


def load_runner(
    model: NodeModel,
    buffer: NDArray[np.uint8] | DeviceBuffer | None,
    on_progress: Callable[[float], None],
    cache: PackedCache | None = None,
    ranks: RankLoader | None = None,
    *,
    is_awaited: bool = False,
) -> ModelRunner:
    """Load the weights, place the KV cache in `buffer` (or in new memory), and warm up.

    Slow, so for a thread. With `ranks`, they load theirs. If `is_awaited`, the first step warms up.

    Raises:
        ModelError: the checkpoint's weights do not match its config, or are damaged.
        NodeSick: one of the ranks has ended.
    """
    started_s = time.perf_counter()
    decoder = (_load_alone if ranks is None else ranks.load)(model, on_progress, cache)
    kv_cache = KvCache(model.rank_layouts[0], model.num_blocks, model.device, buffer)
    runner = ModelRunner(decoder, kv_cache, grammars=GrammarProgress(_native.num_threads()))
    loaded_s = time.perf_counter()
    if not is_awaited:
        runner.warmup(min(WARMUP_TOKENS, model.max_model_len))
    warm_s = time.perf_counter()
    log.info("weights in %.2f s, warm in %.2f s", loaded_s - started_s, warm_s - loaded_s)
    return runner


def _load_alone(
    model: NodeModel, on_progress: Callable[[float], None], cache: PackedCache | None
) -> Decoder:
    return load_decoder(
        model.checkpoint,
        model.plan(),
        model.activations,
        model.device,
        on_progress,
        cache=cache,
        kernels="" if model.kernels is None else model.kernels.variant,
        attention="" if model.attention == "auto" else model.attention,
        has_graphs=model.has_graphs,
        worst_step=model.worst_step,
        tap_layers=model.tap_layers,
        kv_codes=model.layout.dtype.is_coded,
    )


def grammar_compiler(model: NodeModel) -> GrammarCompiler:
    """Return the compiler of grammars over the model's vocabulary, which the first one loads."""
    path, config = model.checkpoint.path, model.config
    return GrammarCompiler(partial(load_vocabulary, path, config.vocab_size, config.eos_token_ids))


def use_cores(config: EngineConfig) -> CorePlan:
    """Pin a process that only computes to its cores, with one thread per core.

    Returns the plan. With several ranks, kernels have the threads of rank 0, and torch all.

    Raises:
        ConfigError: the config names a core that this process may not use.
    """
    plan = plan_cores(config, sorted(os.sched_getaffinity(0)))
    set_threads(plan.num_threads)
    _native.set_num_threads(plan.of_rank(0, share_of(config).num_ranks).num_threads)
    use_service_cores(plan)
    use_compute_cores(plan)
    return plan


def share_of(engine: EngineConfig) -> HostShare:
    """Return what the first host of a node, which is the node itself, has of it."""
    num_stages = engine.pipeline_parallel or 1 + len(engine.rank_hosts)
    parallelism = Parallelism(engine.tensor_parallel, num_stages)
    return HostShare(parallelism, 0, tuple(engine.rank_hosts))


def set_threads(num_threads: int) -> None:
    """Set the number of threads of torch and of the native kernels."""
    torch.set_num_threads(num_threads)
    _native.set_num_threads(num_threads)


def _kv_budget(
    engine: EngineConfig,
    device: torch.device,
    checkpoint: Checkpoint,
    model: ModelConfig,
    sizes: Sizes,
    share: HostShare,
) -> int:
    """Bytes of the KV pool, on all GPUs. Pages of a CPU pool cost nothing until they are used.

    Those of other hosts are taken to have as much room as this host's.
    """
    if device.type == "cpu":
        return cpu_kv_bytes(engine.kv_memory)
    if engine.kv_memory != "auto":
        return parse_bytes(engine.kv_memory)
    devices = [device_of_rank(device, rank) for rank in range(share.num_ranks)]
    free_bytes, all_bytes = map(min, zip(*map(torch.cuda.mem_get_info, devices), strict=True))
    parallelism = share.parallelism
    first_ranks = range(0, parallelism.num_ranks, parallelism.tensor)
    stages = [Shard.of_rank(rank, parallelism) for rank in first_ranks]
    plans = [_plan(checkpoint, model, sizes.form, device, shard) for shard in stages]
    activations, worst = sizes.activations, _worst_step(engine)
    uses = {
        "has_graphs": engine.cuda_graphs,
        "has_codes": any(matrix.form.is_coded for matrix in plans[0].matrices),
    }
    return parallelism.num_ranks * gpu_kv_bytes(
        free_bytes,
        all_bytes,
        engine.kv_utilization,
        max(weight_bytes(plan, activations) for plan in plans),
        step_bytes(model, activations, worst, stages[0], **uses),
    )


def named_device(name: str) -> torch.device:
    """The device that is to compute, or the first one. Raises ConfigError: there is none such."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'device "{name}" is none of auto, cpu, cuda, cuda:N') from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f'device "{name}": this machine has no usable GPU')
    if device.type not in {"cpu", "cuda"}:
        raise ConfigError(f'device "{name}" is none of auto, cpu, cuda, cuda:N')
    return device
