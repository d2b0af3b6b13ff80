"""Configuration: one frozen struct per concern, composed. Read from TOML and flags, both strict.

A value of "auto" is resolved where the facts are known (the checkpoint, the machine), by a function
that returns a new value; nothing here is ever assigned to.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from pdserve.errors import ConfigError
from pdserve.slo import DEFAULT_CLASS, DEFAULT_CLASSES

Seconds = Annotated[float, Meta(gt=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Mode = Literal["disaggregated", "colocated", "adaptive"]
PrefillPolicyName = Literal["fcfs-budget", "sjf-aging", "edf-slack", "buckets"]
DecodePolicyName = Literal["max-batch", "tpot-cap", "slack-batch", "static"]
Headroom = Literal["greedy", "reserve-static", "reserve-dynamic"]
PoolingName = Literal["auto", "last", "mean", "cls"]
ToolFormatName = Literal["auto", "hermes", "llama3", "mistral", "pythonic"]
RouterName = Literal[
    "predicted", "least-loaded", "power-of-two", "round-robin", "random", "prefix-affinity"
]
Quantization = Literal["none", "int8"]
PrefixPull = Literal["auto", "always", "never"]
TransportName = Literal["shm", "cuda_ipc", "ucx", "nccl", "tcp"]


class ConfigStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every config struct: immutable, by name, unknown keys are errors."""


class ModelConfig(ConfigStruct, frozen=True):
    """Which checkpoint is served, under which name."""

    model: Annotated[str, Meta(description="checkpoint directory or hub id; empty: demo model")] = (
        ""
    )
    revision: Annotated[str | None, Meta(description="hub revision")] = None
    served_model_name: Annotated[
        str | None, Meta(description="name clients use; default: the model's own")
    ] = None


class EngineConfig(ConfigStruct, frozen=True):
    """How a node runs the model."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(description="weights and KV; auto: as the checkpoint says"),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Meta(description="int8: matrices in 8 bits, half the bytes of a step; on CPUs"),
    ] = "none"
    device: Annotated[str, Meta(description="auto, cpu, cuda or cuda:N")] = "auto"
    threads: Annotated[
        int, Meta(ge=0, description="compute threads; 0: one a core, less one of 8 cores or more")
    ] = 0
    cpus: Annotated[str, Meta(description='cores to stay on, as in "0,2-3"; empty: all')] = ""
    block_size: Annotated[Count, Meta(description="tokens in a KV block")] = 16
    kv_memory: Annotated[
        str,
        Meta(description='KV budget, as in "512MiB"; auto: a quarter of free memory, <= 4 GiB'),
    ] = "auto"
    kv_commit: Annotated[
        bool,
        Meta(description="take all KV memory at start, and not as it is needed"),
    ] = False
    max_model_len: Annotated[
        int, Meta(ge=0, description="prompt + output tokens of a request; 0: the model's own")
    ] = 0
    token_budget: Annotated[Count, Meta(description="most tokens computed in one step")] = 512
    max_batch_size: Annotated[Count, Meta(description="most requests in one step")] = 64
    packed_dir: Annotated[
        str,
        Meta(
            description="where packed weights are; empty: pdserve/weights among the user's caches"
        ),
    ] = ""
    packed_limit: Annotated[
        str, Meta(description='disk space for packed weights, as in "64GiB"; 0: none are kept')
    ] = "64GiB"
    prefix_cache: Annotated[bool, Meta(description="reuse KV of equal prompt prefixes")] = True


class ProfileConfig(ConfigStruct, frozen=True):
    """How a node comes to know what its steps take."""

    profile: Annotated[
        Literal["auto", "fresh", "off"],
        Meta(description="auto: measured once, then read; fresh: measured now; off: guessed"),
    ] = "auto"
    profile_s: Annotated[Seconds, Meta(description="for measuring, less the last step")] = 3.0
    profile_dir: Annotated[
        str, Meta(description="where it is kept; empty: pdserve/profiles among the user's caches")
    ] = ""


class PolicyConfig(ConfigStruct, frozen=True):
    """What a node computes next: one policy for each pool, one file each."""

    prefill_policy: Annotated[
        PrefillPolicyName, Meta(description="which prompts go first, on either kind of node")
    ] = "edf-slack"
    prefill_chunk: Annotated[
        int,
        Meta(ge=0, description="prompts give way between chunks of so many tokens; 0: automatic"),
    ] = 0
    decode_policy: Annotated[
        DecodePolicyName, Meta(description="how large a batch decode nodes run")
    ] = "tpot-cap"
    local_chunk: Annotated[
        int,
        Meta(ge=0, description="prompt tokens in a step that decodes; 0: what its TPOT allows"),
    ] = 0
    kv_headroom: Annotated[
        Headroom, Meta(description="room kept for the tokens that running requests will still get")
    ] = "reserve-dynamic"
    watermark: Annotated[
        float, Meta(ge=0, lt=1, description="share of the pool that admission leaves free")
    ] = 0.01
    max_preemptions: Annotated[
        int, Meta(ge=0, description="of one request; after them it is never the victim")
    ] = 3
    default_tpot_s: Annotated[
        Seconds, Meta(description="TPOT aimed at for requests that were promised none")
    ] = 0.25


class HandoffConfig(ConfigStruct, frozen=True):
    """How a prefill node hands KV over."""

    announce_bytes: Annotated[
        int, Meta(ge=0, description="KV of a step told of layer by layer, at least; 0: never")
    ] = 1 << 20
    pinned_limit: Annotated[
        float, Meta(gt=0, le=1, description="share of the pool for prompts and KV not yet pulled")
    ] = 0.5


class PrefixConfig(ConfigStruct, frozen=True):
    """Where KV of prompt prefixes comes from that is not in a node's own pool."""

    prefix_pull: Annotated[
        PrefixPull, Meta(description="prefixes from other nodes; auto: where it saves time")
    ] = "auto"
    tier_memory: Annotated[
        str, Meta(description='host tier for evicted prefixes, as in "8GiB"; 0: none')
    ] = "0"
    tier_dir: Annotated[
        str, Meta(description="where the host tier's file is; empty: the system's temporary files")
    ] = ""


class Timeouts(ConfigStruct, frozen=True):
    """Every deadline a process waits under, by stage. Each has a test."""

    heartbeat_s: Annotated[Seconds, Meta(description="between two load reports")] = 0.5
    liveness_s: Annotated[Seconds, Meta(description="silence after which a peer is lost")] = 5.0
    connect_s: Annotated[Seconds, Meta(description="to attach or to open a session")] = 3.0
    reconnect_s: Annotated[Seconds, Meta(description="between attempts to attach")] = 0.25
    packing_s: Annotated[
        Seconds, Meta(description="for another node to pack the weights, before it is done twice")
    ] = 300.0
    lease_s: Annotated[
        Seconds,
        Meta(description="KV waits this long for a puller; a prefix asked for, at least prefix_s"),
    ] = 10.0
    transfer_s: Annotated[Seconds, Meta(description="one pull of KV blocks")] = 10.0
    prefix_s: Annotated[
        Seconds, Meta(description="for a prefix held elsewhere, before it is computed here")
    ] = 2.0
    ticket_s: Annotated[Seconds, Meta(description="how long a ticket for blocks is good")] = 30.0
    request_s: Annotated[Seconds, Meta(description="one request, from receipt to its end")] = 600.0
    drain_s: Annotated[Seconds, Meta(description="for running work after SIGTERM")] = 30.0


class NodeConfig(ConfigStruct, frozen=True):
    """One prefill or decode node."""

    node_id: Annotated[str, Meta(description="default: role and a random number")] = ""
    host: Annotated[str, Meta(description="address to listen on, and for peers to dial")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="gRPC; 0: any free port")] = 0
    metrics_port: Annotated[Port, Meta(description="HTTP /metrics; 0: any free port")] = 0
    coordinators: Annotated[
        list[str], Meta(min_length=1, description="host:port of every coordinator's gRPC service")
    ] = msgspec.field(default_factory=lambda: ["127.0.0.1:8001"])
    transports: Annotated[
        list[TransportName], Meta(description="for KV, best first; empty: all that are of use here")
    ] = msgspec.field(default_factory=list)
    checksums: Annotated[
        bool, Meta(description="check every block's bytes after each pull; not with KV on a GPU")
    ] = False
    checkpoint: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    profile: ProfileConfig = ProfileConfig()
    policy: PolicyConfig = PolicyConfig()
    handoff: HandoffConfig = HandoffConfig()
    prefix: PrefixConfig = PrefixConfig()
    timeouts: Timeouts = Timeouts()


class RoutingConfig(ConfigStruct, frozen=True):
    """Which nodes requests go to, which are refused, and when nodes change pools."""

    router: Annotated[RouterName, Meta(description="how nodes are chosen")] = "predicted"
    admission: Annotated[
        bool, Meta(description="refuse (429) what would miss its class's TTFT or TPOT")
    ] = True
    slo_classes: Annotated[
        list[str],
        Meta(min_length=1, description="as in 'interactive ttft=2 tpot=0.1 hold=0.9 priority=2'"),
    ] = msgspec.field(default_factory=lambda: list(DEFAULT_CLASSES))
    default_class: Annotated[str, Meta(description="of requests that name none")] = DEFAULT_CLASS
    max_waiting: Annotated[
        Count, Meta(description="requests without a promise that wait for room, at most")
    ] = 1024
    rebalance: Annotated[
        bool, Meta(description="turn nodes over when load shifts for long; one coordinator only")
    ] = False


API_KEY_VARIABLE = (
    "PDSERVE_API_KEY"  # in the environment: of the coordinator a good key, of commands theirs
)


class AnswerConfig(ConfigStruct, frozen=True):
    """How a model's answers are to be read, and its embeddings made."""

    tool_format: Annotated[
        ToolFormatName, Meta(description="how it writes tool calls; auto: as its chat template")
    ] = "auto"
    split_reasoning: Annotated[
        bool, Meta(description="text between <think> and </think> becomes reasoning_content")
    ] = False
    pooling: Annotated[
        PoolingName,
        Meta(
            description="states that embeddings are made of; auto: as the checkpoint says, or last"
        ),
    ] = "auto"


class AccessConfig(ConfigStruct, frozen=True):
    """Who may ask, and what is written down about it."""

    key_file: Annotated[
        str, Meta(description="TOML with tenants and their keys; followed when it changes")
    ] = ""
    cors_origins: Annotated[
        list[str],
        Meta(description='pages that browsers let use the API, as in "https://a.org"; "*": all'),
    ] = []
    usage_db: Annotated[
        str, Meta(description="SQLite file of what each key used; empty: not kept")
    ] = ""


class CoordinatorConfig(ConfigStruct, frozen=True):
    """The coordinator: HTTP for clients, gRPC for nodes."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="HTTP; 0: any free port")] = 8000
    grpc_port: Annotated[Port, Meta(description="gRPC; 0: any free port")] = 8001
    mode: Annotated[Mode, Meta(description="where prompts are prefilled")] = "disaggregated"
    max_inflight: Annotated[
        Count, Meta(description="requests on nodes before new ones are refused, or wait")
    ] = 1024
    checkpoint: ModelConfig = ModelConfig()
    answers: AnswerConfig = AnswerConfig()
    routing: RoutingConfig = RoutingConfig()
    access: AccessConfig = AccessConfig()
    timeouts: Timeouts = Timeouts()


C = TypeVar("C", bound=ConfigStruct)

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_bytes(text: str) -> int:
    """Bytes of "1048576", "512MiB" or "2GB".

    Raises:
        ConfigError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", text.upper())
    if match is None:
        raise ConfigError(f'"{text}" is not a size: write it as "512MiB", "2GB" or in bytes')
    return int(float(match[1]) * _UNITS[match[2] or ""])


def parse_cpus(text: str) -> list[int]:
    """Core numbers of a list such as "0,2-3"; empty text gives an empty list.

    Raises:
        ConfigError: the text is not a list of cores.
    """
    cores: list[int] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ConfigError(f'"{text}" is not a list of cores: write it as "0,2-3"')
        cores.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return cores


def format_cpus(cores: Sequence[int]) -> str:
    """The shortest text that `parse_cpus` reads as these ascending cores: "0,2-3"."""
    parts: list[str] = []
    start = 0
    for i, core in enumerate(cores):
        if i + 1 == len(cores) or cores[i + 1] != core + 1:
            parts.append(str(core) if i == start else f"{cores[start]}-{core}")
            start = i + 1
    return ",".join(parts)


def load_config(struct: type[C], path: Path | None, overrides: dict[str, Any]) -> C:
    """A config from an optional TOML file, with `overrides` (nested the same way) on top.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or value out of range; says which.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read the config file {path}: {error}") from error
    try:
        return msgspec.convert(_merged(values, overrides), struct)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path or 'flags'}: {error}") from error


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        both = isinstance(value, dict) and isinstance(below, dict)
        merged[key] = _merged(below, value) if both and isinstance(below, dict) else value
    return merged
