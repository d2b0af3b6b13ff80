"""Configuration: one frozen struct per concern, composed into one for each kind of process.

The descriptions are the help texts of the flags (`pdserve/settings/flags.py`). A value of "auto" is
resolved where the facts are known (the checkpoint, the machine), by a function that returns a new
value; nothing here is ever assigned to.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta

from pdserve.settings.access import AccessConfig, SecurityConfig
from pdserve.settings.answers import AnswerConfig
from pdserve.settings.flag_groups import COORDINATOR, NODE
from pdserve.settings.places import PlaceConfig
from pdserve.settings.prefixes import PrefixConfig
from pdserve.settings.speculation import SpeculationConfig
from pdserve.settings.struct import (
    MOST_SECONDS,
    ConfigStruct,
    Count,
    KvPort,
    Port,
    Requests,
    Seconds,
    Size,
    Tokens,
)
from pdserve.settings.timeouts import CoordinatorTimeouts, NodeTimeouts
from pdserve.settings.tracing import TracingConfig
from pdserve.settings.values import check_router, parse_adapters, parse_shares
from pdserve.shared.addresses import check_addresses, check_own_host
from pdserve.shared.costs import DESCRIPTION, Prices
from pdserve.shared.entry_points import PolicyKind
from pdserve.shared.simulated_link import check_links
from pdserve.shared.slo import DEFAULT_CLASS, DEFAULT_CLASSES

Mode = Literal["disaggregated", "colocated", "adaptive", "flowing", "multiplexed"]
# Those whose nodes are all decode nodes, and compute the prompts of their streams.
ONE_POOL: Final[tuple[Mode, ...]] = ("colocated", "multiplexed")
PrefillPolicyName = Literal["fcfs-budget", "sjf-aging", "edf-slack", "buckets", "laps"]
DecodePolicyName = Literal["max-batch", "tpot-cap", "slack-batch", "static", "shortest-remaining"]
Headroom = Literal["greedy", "reserve-static", "reserve-dynamic"]
RouterName = Literal[
    "predicted",
    "least-loaded",
    "power-of-two",
    "round-robin",
    "random",
    "prefix-affinity",
    "deflection",
    "conserve",
    "ppd",
    "prfaas",
]
Quantization = Literal["none", "int8", "fp8", "int4"]
AttentionName = Literal["auto", "flashinfer", "flash_attn", "triton", "reference"]
TransportName = Literal["shm", "cuda_ipc", "ucx", "nccl", "tcp"]

# Other packages may add to these: their names are chosen by, and the names above are our own.
PREFILL_POLICIES = PolicyKind(
    "prefill policy", "pdserve.prefill_policies", get_args(PrefillPolicyName)
)
DECODE_POLICIES = PolicyKind("decode policy", "pdserve.decode_policies", get_args(DecodePolicyName))
ROUTERS = PolicyKind("router", "pdserve.routers", get_args(RouterName))


# Settings of a process that those who start it have, too.
ClusterMode = Annotated[
    Mode,
    Meta(
        description="which nodes compute prompts; colocated: decode nodes; adaptive, flowing: "
        "either; multiplexed: decode nodes, beside their streams"
    ),
]
MaxInflight = Annotated[
    Requests, Meta(description="maximum requests on the nodes; others wait or are refused")
]
Transports = Annotated[
    list[TransportName],
    Meta(description="KV transports, best first; empty: all that are useful here"),
]
Models = Annotated[
    str,
    Meta(description="TOML file of several models, instead of one; of nodes, --model is one there"),
]
Checksums = Annotated[
    bool, Meta(description="verify the bytes of every block that moves (CPUs only)")
]

WHOLE = {"commas": "belong to values"}  # `Meta.extra` of a list: a flag gives one value


class WeightsConfig(ConfigStruct, frozen=True):
    """Which checkpoint is loaded."""

    model: Annotated[
        str,
        Meta(description="directory, GGUF file, hub id or hub-id:FILE.gguf; empty: the demo model"),
    ] = ""
    revision: Annotated[str | None, Meta(description="branch, tag or commit on the hub")] = None


class CheckpointConfig(WeightsConfig, frozen=True):
    """Which checkpoint is served, under which name."""

    served_model_name: Annotated[
        str | None, Meta(description="model name for clients (default: its own)")
    ] = None
    adapters: Annotated[
        list[str],
        Meta(
            description="NAME=PATH of a LoRA adapter to serve at first, in a folder of the nodes",
            extra=WHOLE,
        ),
    ] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, where an adapter lacks name or path."""
        parse_adapters(self.adapters)


class EngineConfig(ConfigStruct, frozen=True):
    """How a node runs the model."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="data type of weights and activations; auto: the checkpoint's own"),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Meta(
            description="int8, fp8: 8-bit weight matrices, half the memory traffic; "
            "int4: 4-bit ones, but for the last, a third"
        ),
    ] = "none"
    prefill_quantization: Annotated[
        Literal["same", Quantization],
        Meta(description="quantization of prefill nodes, if another; for mode disaggregated"),
    ] = "same"
    kv_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        Meta(description="how KV is stored; int8, fp8: in half the bytes"),
    ] = "auto"
    wire_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        Meta(description="what KV is rounded to, to be sent so by slow networks (CPU only)"),
    ] = "auto"
    device: Annotated[str, Meta(description="auto, cpu, cuda or cuda:N")] = "auto"
    attention: Annotated[
        AttentionName, Meta(description="on GPUs; auto: what is measured to be the fastest")
    ] = "auto"
    cuda_graphs: Annotated[bool, Meta(description="replay steps as CUDA graphs")] = True
    kernels: Annotated[
        str,
        Meta(description="build of the CPU kernels (pdserve doctor lists them); auto: the fastest"),
    ] = "auto"
    threads: Annotated[
        int, Meta(ge=0, description="compute threads; 0: one per core, minus one from 8 cores on")
    ] = 0
    tensor_parallel: Annotated[
        Count,
        Meta(description="processes that compute each layer together; a GPU each"),
    ] = 1
    pipeline_parallel: Annotated[
        int,
        Meta(ge=0, description="stages, which share out the layers; 0: one for each host"),
    ] = 0
    rank_hosts: Annotated[
        list[str],
        Meta(description="host:port of each pdserve rank, in the order of their ranks"),
    ] = msgspec.field(default_factory=list)
    cpus: Annotated[str, Meta(description='cores to run on, such as "0,2-3"; empty: all')] = ""
    block_size: Annotated[
        Tokens,
        Meta(description="tokens per KV block; 0: 16, on CPUs 16 to 64 by model"),
    ] = 0
    kv_memory: Annotated[
        Size,
        Meta(
            description='KV cache size, such as "512MiB"; auto: a quarter of free memory, '
            "<= 4 GiB, but what is left of a GPU"
        ),
    ] = "auto"
    kv_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of a GPU for weights, steps and KV, if kv_memory is auto",
        ),
    ] = 0.9
    kv_commit: Annotated[
        bool,
        Meta(description="allocate all KV memory at start instead of on demand"),
    ] = False
    max_model_len: Annotated[
        Tokens,
        Meta(description="maximum prompt + output tokens per request; 0: the model's limit"),
    ] = 0
    token_budget: Annotated[
        Count, Meta(description="maximum tokens computed in a step", extra={"unit": "tokens"})
    ] = 512
    max_batch_size: Annotated[Requests, Meta(description="maximum requests in a step")] = 64
    max_adapters: Annotated[
        Count, Meta(description="maximum adapters served at a time; unused ones leave for others")
    ] = 32
    adapter_memory: Annotated[
        Size, Meta(description="memory for adapters, those that may come back included")
    ] = "4GiB"
    packed_limit: Annotated[
        Size, Meta(description='size of the cache of packed weights, such as "64GiB"; 0: no cache')
    ] = "64GiB"
    prefix_cache: Annotated[bool, Meta(description="reuse the KV of equal prompt prefixes")] = True

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, if the ranks cannot be shared out."""
        check_addresses(self.rank_hosts)
        num_hosts = 1 + len(self.rank_hosts)
        if self.tensor_parallel * self.pipeline_parallel % num_hosts:
            raise ValueError(
                f"pipeline_parallel {self.pipeline_parallel} x tensor_parallel "
                f"{self.tensor_parallel} is not a multiple of the {num_hosts} hosts"
            )

    @property
    def is_by_role(self) -> bool:
        """Whether prefill nodes have other weights than decode nodes."""
        return self.prefill_quantization not in ("same", self.quantization)


class ProfileConfig(ConfigStruct, frozen=True):
    """How a node learns what its steps cost."""

    profile: Annotated[
        Literal["auto", "fresh", "off"],
        Meta(
            description="step costs. auto: measure once, then cache; fresh: measure now; off: guess"
        ),
    ] = "auto"
    profile_s: Annotated[Seconds, Meta(description="time to spend on measuring step costs")] = 3.0


class PolicyConfig(ConfigStruct, frozen=True):
    """The policies of a node's scheduler."""

    prefill_policy: Annotated[
        str,
        Meta(
            description=f"which prompts are computed first: {', '.join(PREFILL_POLICIES.built_in)}"
        ),
    ] = "edf-slack"
    prefill_chunk: Annotated[
        Tokens,
        Meta(description="tokens after which other prompts may go first; 0: automatic"),
    ] = 0
    decode_policy: Annotated[
        str,
        Meta(description=f"how large decode batches get: {', '.join(DECODE_POLICIES.built_in)}"),
    ] = "tpot-cap"
    local_chunk: Annotated[
        Tokens,
        Meta(
            description="prompt tokens per step beside decoding requests; 0: as their TPOT allows",
        ),
    ] = 0
    kv_headroom: Annotated[
        Headroom, Meta(description="KV blocks reserved for the future output of running requests")
    ] = "reserve-dynamic"
    watermark: Annotated[
        float, Meta(ge=0, lt=1, description="share of the KV pool that admission keeps free")
    ] = 0.01
    default_tpot_s: Annotated[
        Seconds, Meta(description="TPOT to aim at for requests without a TPOT promise")
    ] = 0.25

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, if there is no policy of that name."""
        PREFILL_POLICIES.check(self.prefill_policy)
        DECODE_POLICIES.check(self.decode_policy)


class HandoffConfig(ConfigStruct, frozen=True):
    """How a prefill node hands requests off to decode nodes."""

    announce_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="announce KV layer by layer if a step has at least this much; 0: never",
            extra={"unit": "bytes"},
        ),
    ] = 1 << 20
    pinned_limit: Annotated[
        float,
        Meta(gt=0, le=1, description="share of the pool for running prompts and KV not yet pulled"),
    ] = 0.5
    links: Annotated[
        list[str],
        Meta(
            description="links to simulate, by patterns of node ids: 'EXPORTERS PULLERS "
            "bandwidth=BYTES/S delay=SECONDS loss=SHARE', with raw no codec is used"
        ),
    ] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, if a link cannot be parsed."""
        check_links(self.links)


class NodeConfig(ConfigStruct, frozen=True):
    """One prefill or decode node."""

    flag_groups = NODE

    node_id: Annotated[
        str, Meta(description="unique name (default: the role and a random number)")
    ] = ""
    host: Annotated[str, Meta(description="address to listen on, for peers")] = "127.0.0.1"
    advertise: Annotated[str, Meta(description="name or address to tell peers; empty: host")] = ""
    port: Annotated[Port, Meta(description="gRPC port; 0: any free port")] = 0
    kv_port: Annotated[
        KvPort, Meta(description="KV port: tcp, +1 nccl, +2 ucx; +3 each further GPU; 0: any")
    ] = 0
    metrics_port: Annotated[Port, Meta(description="HTTP port of /metrics; 0: any free port")] = 0
    coordinators: Annotated[
        list[str], Meta(min_length=1, description="gRPC host:port of coordinators or a name of all")
    ] = msgspec.field(default_factory=lambda: ["127.0.0.1:8001"])
    transports: Transports = msgspec.field(default_factory=list)
    checksums: Checksums = True
    multiplexed: Annotated[
        bool, Meta(description="compute prompts beside decodes, on shares of the cores (CPU only)")
    ] = False
    standby: Annotated[
        bool, Meta(description="load, then wait until a coordinator gives it a pool that lacks one")
    ] = False
    models: Models = ""
    checkpoint: WeightsConfig = WeightsConfig()
    engine: EngineConfig = EngineConfig()
    place: PlaceConfig = PlaceConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    profile: ProfileConfig = ProfileConfig()
    policy: PolicyConfig = PolicyConfig()
    handoff: HandoffConfig = HandoffConfig()
    prefix: PrefixConfig = PrefixConfig()
    security: SecurityConfig = SecurityConfig()
    timeouts: NodeTimeouts = NodeTimeouts()

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, where settings contradict each other."""
        check_own_host(self.host, self.advertise)
        check_addresses(self.coordinators)
        self.prefix.check_used(prefix_cache=self.engine.prefix_cache)


class RoutingConfig(ConfigStruct, frozen=True):
    """Routing, admission, and when nodes change pools."""

    router: Annotated[
        str,
        Meta(description=f"how nodes are chosen for a request: {', '.join(ROUTERS.built_in)}"),
    ] = "predicted"
    admission: Annotated[
        bool, Meta(description="refuse (429) requests predicted to miss their TTFT or TPOT promise")
    ] = True
    slo_classes: Annotated[
        list[str],
        Meta(
            min_length=1,
            description="service classes: 'NAME ttft=2 tpot=0.1 hold=0.9 priority=2 weight=1 "
            "wait=5'; auto: promises from what the nodes have measured",
        ),
    ] = msgspec.field(default_factory=lambda: list(DEFAULT_CLASSES))
    default_class: Annotated[str, Meta(description="class of requests that name none")] = (
        DEFAULT_CLASS
    )
    max_waiting: Annotated[
        Requests, Meta(description="maximum requests without a promise that wait for capacity")
    ] = 1024
    revision_shares: Annotated[
        list[str],
        Meta(
            description="revisions to serve side by side, by their first characters, and the "
            "share of the conversations of each, such as 4f0c=0.9; empty: one revision"
        ),
    ] = msgspec.field(default_factory=list)
    rebalance: Annotated[
        bool,
        Meta(description="move nodes between pools when load shifts; one coordinator does so"),
    ] = False
    sleep_after_s: Annotated[
        float,
        Meta(
            ge=0,
            le=MOST_SECONDS,
            description="time without requests after which no nodes are desired, and requests wait "
            "for nodes; 0: never",
            extra={"unit": "seconds"},
        ),
    ] = 0.0
    grow_for_batches: Annotated[
        bool,
        Meta(description="desire nodes for lines of batches, too, not only for others"),
    ] = False
    price: Annotated[
        list[str],
        Meta(description=f"{DESCRIPTION}; empty: what tokens cost is not shown"),
    ] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, where a name or a share is wrong."""
        ROUTERS.check(self.router)
        parse_shares(self.revision_shares)
        Prices.of(self.price)


class CoordinatorConfig(ConfigStruct, frozen=True):
    """The coordinator: HTTP for clients, gRPC for nodes."""

    flag_groups = COORDINATOR

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="HTTP port; 0: any free port")] = 8000
    grpc_host: Annotated[
        str, Meta(description="address that nodes attach to; empty: the same as host")
    ] = ""
    grpc_port: Annotated[Port, Meta(description="gRPC port; 0: any free port")] = 8001
    cpus: Annotated[str, Meta(description='cores to run on, such as "0,2-3"; empty: all')] = ""
    restarts: Annotated[
        bool,
        Meta(
            description="nodes that are lost are started again, as by systemd: streams wait for "
            "them for as long as their requests may take"
        ),
    ] = False
    mode: ClusterMode = "disaggregated"
    max_inflight: MaxInflight = 1024
    models: Models = ""
    checkpoint: CheckpointConfig = CheckpointConfig()
    answers: AnswerConfig = AnswerConfig()
    routing: RoutingConfig = RoutingConfig()
    access: AccessConfig = AccessConfig()
    security: SecurityConfig = SecurityConfig()
    tracing: TracingConfig = TracingConfig()
    timeouts: CoordinatorTimeouts = CoordinatorTimeouts()

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, if the router is not for the mode."""
        check_router(self.routing.router, self.mode)

    @property
    def nodes_host(self) -> str:
        """The address that nodes attach to."""
        return self.grpc_host or self.host
