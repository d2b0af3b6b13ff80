"""What `pdserve up` checks before it starts anything: all that is known without loading the model.

A node would say the same, but after it has loaded its modules, and beside the others' lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.placement import gpus_of_node
from pdserve.commands.cluster.plan import Machine, cluster_nodes, place_memory, plan_coordinator
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.settings.config import CheckpointConfig, EngineConfig
from pdserve.settings.models import SharedNodes, read_models
from pdserve.settings.speculation import draft_model
from pdserve.settings.values import IN_MEMORY, parse_adapters
from pdserve.shared.addresses import loopback
from pdserve.shared.errors import ConfigError, ModelError, PdserveError

Say = Callable[[str], None]


def check_cluster(config: ClusterConfig, machine: Machine, say: Say) -> None:
    """Check settings, files, devices, the model and its memory. It may ask the hub, and says so.

    Raises:
        PdserveError: the cluster would not start; says why.
    """
    from coordinator.front_check import check_front

    cluster_nodes(config)
    check_front(plan_coordinator(config, config.port, loopback(config.host), 0))
    if config.on:  # the model and the devices are on other machines
        return
    _check_files(config)
    _check_device(config.engine, machine.num_gpus)
    _check_adapters(config.checkpoint.adapters)
    if not config.models:
        _check_model(config, machine.num_gpus, say)
        return
    file, needed = read_models(config.models), dict[str, int]()
    for name, model in file.models.items():
        alone = replace(
            config,
            models="",
            checkpoint=CheckpointConfig(model=model.source, revision=model.revision),
            engine=model.engine(config.engine),
        )
        try:
            needed[name] = _check_model(alone, machine.num_gpus, say)
        except PdserveError as error:
            raise type(error)(f"{config.models}: models.{name}: {error}") from error
    _check_places(config.models, file.shared, needed, place_memory(config, cluster_nodes(config)))


def _check_files(config: ClusterConfig) -> None:
    """Raises ConfigError: usage, or a store of prefixes, cannot be kept where it is to be."""
    if config.prefix.kv_store:
        from pdserve.node.prefixes.store.opening import check_store

        check_store(config.prefix)
    if (file := config.access.usage_db) not in ("", IN_MEMORY):
        from coordinator.tenants.ledger import Ledger

        Ledger(Path(file)).close()


def _check_adapters(adapters: Sequence[str]) -> None:
    """Raises AdapterRefused: a folder has no adapter that is served."""
    from pdserve.engine.adapters.config import read_config

    for folder in parse_adapters(adapters).values():
        read_config(Path(folder))


def _check_places(file: str, shared: SharedNodes, needed: Mapping[str, int], memory: int) -> None:
    """Raises ConfigError: a shared node cannot hold the largest models that it may be asked for."""
    largest = sorted(needed, key=needed.__getitem__)[-shared.at_once :]
    num_bytes = sum(needed[name] for name in largest)
    if memory and num_bytes > memory:
        names = " and ".join(largest)
        raise ConfigError(
            f"{file}: {names} take {_mib(num_bytes)} when they are awake at once, each with a "
            f"request of its longest, and a shared node has {_mib(memory)}: raise shared.memory, "
            "or lower at_once, or their max_model_len"
        )


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // (1 << 20))} MiB"


def _check_device(engine: EngineConfig, num_gpus: int) -> None:
    """Raises ConfigError: there is no such device here, or too few of them."""
    device = engine.device
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d+))?", device)
    if match is None:
        raise ConfigError(f'device "{device}" is none of auto, cpu, cuda, cuda:N')
    if device.startswith("cuda") and not num_gpus:
        raise ConfigError(f'device "{device}": this machine has no usable GPU: leave it out')
    if match[1] and int(match[1]) >= num_gpus:
        raise ConfigError(f'device "{device}": there are {num_gpus} GPUs, the first is cuda:0')
    needed = gpus_of_node(engine)
    if _is_gpu(engine, num_gpus) and needed > num_gpus:
        raise ConfigError(
            f"each node takes {needed} GPUs, and there are {num_gpus}: lower "
            "engine.tensor_parallel or engine.pipeline_parallel"
        )


def _is_gpu(engine: EngineConfig, num_gpus: int) -> bool:
    return num_gpus > 0 and engine.device != "cpu"


def _check_model(config: ClusterConfig, num_gpus: int, say: Say) -> int:
    """Return the bytes that it takes here at least; 0: that is not known.

    Raises PdserveError: it cannot be served, or not with these settings or this memory.
    """
    from pdserve.engine.models.config import load_model_config
    from pdserve.engine.ranks.shard import check_ranks
    from pdserve.engine.ranks.sizes import Parallelism
    from pdserve.engine.weights.codings import stored_codings
    from pdserve.model_files.checkpoint import is_of_hub, resolve_checkpoint
    from pdserve.model_files.sampling_defaults import sampling_defaults
    from pdserve.model_files.tokenizer import check_tokenizer
    from pdserve.node.start.precision import engine_of
    from pdserve.node.start.sizing import check_memory, sizes_of
    from pdserve.protocol import NodeRole

    named, engine = config.checkpoint, config.engine
    is_here = not named.model or Path(named.model).expanduser().exists()
    if not is_here and is_of_hub(named.model):
        say(f"looking for {named.model} on the hub, or in its cache")
    checkpoint = resolve_checkpoint(
        named.model or str(CHECKPOINT_PATH), named.revision, with_weights=is_here
    )
    model = load_model_config(checkpoint)
    check_tokenizer(checkpoint.path)
    sampling_defaults(checkpoint)
    num_stages = engine.pipeline_parallel or 1 + len(engine.rank_hosts)
    check_ranks(model, Parallelism(engine.tensor_parallel, num_stages))
    if _is_gpu(engine, num_gpus):
        for role in NodeRole:
            sizes_of(engine_of(engine, role), model, "cuda")
        return 0
    num_bytes, codings = _draft_bytes(draft_model(config.speculation), checkpoint.path), None
    if is_here:
        num_bytes += checkpoint.weight_bytes()
        codings = stored_codings(checkpoint, model)
    return max(
        check_memory(engine_of(engine, role), model, num_bytes, codings=codings)
        for role in NodeRole
    )


def _draft_bytes(named: str, model: Path) -> int:
    """Size of the draft model's weights; 0: there is none, or it is on the hub.

    Raises:
        ConfigError: it has another vocabulary than the model.
    """
    from pdserve.model_files.checkpoint import resolve_checkpoint
    from pdserve.model_files.same_vocabulary import check_same_vocabulary

    if not named or not Path(named).expanduser().exists():
        return 0
    draft = resolve_checkpoint(named, None)
    try:
        if not draft.config().get("speculators_model_type"):  # a head has no tokenizer
            check_same_vocabulary(model, draft.path)
    except ModelError as error:
        raise ConfigError(f"speculation.model {named}: {error}") from error
    return draft.weight_bytes()
