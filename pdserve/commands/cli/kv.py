"""`pdserve kv`: how many requests fit on given devices, beside a model's weights."""

from __future__ import annotations

from msgspec import structs

from pdserve.commands.bench.output import print_json
from pdserve.commands.cli.kv_config import KvConfig
from pdserve.settings.values import parse_bytes
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.exit_codes import OK


def run(config: KvConfig, setup: dict[str, object]) -> int:
    """Print what fits.

    Raises:
        ConfigError: the model cannot be divided among the devices, or does not fit, or does not
            take requests of that length.
        ModelError: it cannot be served.
    """
    from pdserve.commands.bench.checkpoints.model_config import model_named
    from pdserve.engine.plan.forms import ActivationDtype
    from pdserve.engine.steps.worst import LargestStep
    from pdserve.kv import KvDtype
    from pdserve.node.memory.capacity import Devices, capacity
    from pdserve.node.memory.draft_share import draft_kv

    model = model_named(config.model)
    if config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the model's own "
            f"{model.max_model_len}"
        )
    longest = config.max_model_len or model.max_model_len
    found = capacity(
        model,
        ActivationDtype(config.dtype),
        Devices(
            memory_bytes=parse_bytes(config.device_memory),
            number=config.devices,
            stages=config.pipeline_parallel,
            utilization=config.kv_utilization,
        ),
        LargestStep(config.token_budget, config.max_batch_size),
        block_size=config.block_size,
        context=min(config.context, longest),
        longest=longest,
        kv_dtype=None if config.kv_dtype == "auto" else KvDtype(config.kv_dtype),
    )
    if config.draft:
        own = draft_kv(found.kv_bytes, config.draft, model, KvDtype(config.dtype))
        found = structs.replace(found, draft_kv_bytes=own.num_bytes, draft_tokens=own.num_tokens)
    if config.json:
        print_json(found, setup)
        return OK
    of_each = "of each device" if config.devices > 1 else "of the device"
    for what, num_bytes in (
        ("weights", found.weight_bytes),
        ("largest step", found.step_bytes),
        ("left for KV", found.kv_bytes),
    ):
        print(f"{what:13} {num_bytes / 1e9:8.2f} GB {of_each}")
    print(f"KV            {found.token_bytes:8} bytes a token {of_each}: {found.num_tokens} tokens")
    if found.state_bytes:
        print(f"state         {found.state_bytes:8} bytes a request besides")
    if found.draft_kv_bytes:
        left = (found.kv_bytes - found.draft_kv_bytes) // found.token_bytes
        print(
            f"on CPUs {found.draft_kv_bytes / 1e9:.2f} GB of it for {found.draft_tokens} tokens of "
            f"drafts, and so {left} of the model"
        )
    print(f"format of KV on CPUs: {found.kv_format}")
    print(f"requests of {min(config.context, longest)} tokens: {found.num_paged}")
    if found.held_on_cpus < 1:
        print(
            f"  on CPUs, {found.held_on_cpus:.2f} of the KV of each: windows have passed the rest, "
            "and it is given back"
        )
    print(
        f"  with room for {longest} each from the start on, as without blocks: "
        f"{found.num_preallocated}"
    )
    return OK
