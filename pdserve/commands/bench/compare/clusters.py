"""Starts the clusters of `pdserve bench compare`: same cores, same model, same promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from msgspec.structs import replace

from pdserve.commands.bench.compare.config import CompareConfig
from pdserve.commands.bench.compare.runner import Candidate, ModeServer
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.cluster.child import LineSink
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.placement import gpus_of_node
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.settings.config import (
    ONE_POOL,
    CheckpointConfig,
    EngineConfig,
    HandoffConfig,
    Mode,
    RoutingConfig,
)
from pdserve.settings.values import parse_bytes
from pdserve.shared.errors import ClusterError

_START_S = 120.0
_SETTLE_S = 15.0
_LOOK_S = 0.05
_REPLY_S = 5.0
_KV_MEMORY = "512MiB"  # per node: all modes run at once, so the default would be too much


class Clusters:
    """Starts each candidate as a cluster on this machine."""

    def __init__(
        self,
        config: CompareConfig,
        model: str,
        on_line: LineSink,
        tell: Callable[[str], None],
        num_gpus: int = 0,
    ) -> None:
        """Start nothing yet.

        Args:
            config: of the comparison.
            model: a directory or hub id.
            on_line: receives the output of the processes.
            tell: receives what makes clusters slower than they might be, once.
            num_gpus: for the nodes; 0: they compute on CPUs.
        """
        self._config = config
        self._model = model
        self._on_line = on_line
        self._tell = tell
        self._told: set[str] = set()
        self._num_gpus = num_gpus
        self._policies = {chosen.name: chosen for chosen in config.contestants}

    def cluster_config(self, candidate: Candidate, promise: Promise | None) -> ClusterConfig:
        """A cluster whose only class has this promise; without a promise nothing is refused."""
        config = self._config
        chosen = self._policies.get(candidate.mode)
        mode = chosen.mode if chosen is not None else msgspec.convert(candidate.mode, Mode)
        has_one_pool = mode in ONE_POOL
        num_nodes = config.prefill + config.decode
        engine, policy, tuning = config.engine, config.policy, candidate.tuning
        if engine.kv_memory == "auto":
            engine = self._with_share(engine)
        if chosen is not None:
            policy = chosen.policy(policy)
        if tuning is not None:
            policy = replace(policy, local_chunk=tuning.local_chunk)
            if tuning.one_node:
                engine = together(engine, num_nodes, self._num_gpus)
                num_nodes = 1
        if mode == "multiplexed":  # each node is a prefill and a decode node
            engine, num_nodes = together(engine, 2), config.decode
        promised = f" ttft={promise.ttft_s:.6f} tpot={promise.tpot_s:.6f}" if promise else ""
        routing = RoutingConfig(
            admission=config.admission and candidate.refuses and promise is not None,
            slo_classes=[f"measured{promised}"],
            default_class="measured",
        )
        return ClusterConfig(
            port=0,
            mode=mode,
            prefill=None if has_one_pool else config.prefill,
            decode=num_nodes if has_one_pool else config.decode,
            max_inflight=4096,
            transports=config.transports,
            start_s=_START_S,
            checkpoint=CheckpointConfig(model=self._model),
            engine=engine,
            speculation=config.speculation,
            policy=policy,
            handoff=HandoffConfig(links=config.links),
            routing=routing if chosen is None else chosen.routing(routing),
        )

    @asynccontextmanager
    async def launch(
        self, candidate: Candidate, promise: Promise | None
    ) -> AsyncIterator[ModeServer]:
        """A running cluster; see `runner.Launch`."""
        cluster = Cluster(self.cluster_config(candidate, promise), on_line=self._on_line)
        async with cluster as running:
            if running.warning and running.warning not in self._told:
                self._told.add(running.warning)
                self._tell(f"{candidate.mode}: {running.warning}")
            model = (await running.status()).model
            yield RunningServer(running, model, await max_model_len(running.url, model))

    def _with_share(self, engine: EngineConfig) -> EngineConfig:
        """With the nodes' memory for KV: all modes have their clusters at the same time."""
        if self._num_gpus:
            share = engine.kv_utilization / len([*self._config.modes, *self._policies])
            return replace(engine, kv_utilization=share)
        return replace(engine, kv_memory=_KV_MEMORY)


def together(engine: EngineConfig, num_nodes: int, num_gpus: int = 0) -> EngineConfig:
    """The config of one node that has the resources of `num_nodes` nodes."""
    memory = engine.kv_memory
    if memory != "auto":
        memory = str(num_nodes * parse_bytes(memory))
    ranks = engine.tensor_parallel
    if engine.device in ("auto", "cuda"):  # else all nodes are on one GPU, or on those behind it
        groups = min(num_nodes, max(1, num_gpus // gpus_of_node(engine)))
        ranks <<= groups.bit_length() - 1  # heads are divided by powers of two
    return replace(
        engine,
        threads=num_nodes * engine.threads,  # 0 stays 0: one on each core that it gets
        kv_memory=memory,
        tensor_parallel=ranks,
    )


class RunningServer:
    """A cluster as a server that can be measured."""

    def __init__(self, cluster: Cluster, model: str, max_model_len: int) -> None:
        self.url = cluster.url
        self.model = model
        self.max_model_len = max_model_len
        self._cluster = cluster

    def pause(self) -> None:
        """Nothing: an idle cluster sends heartbeats, and that is all."""

    def resume(self) -> None:
        """As `pause`."""

    async def settle(self) -> None:
        """As ModeServer.settle."""
        inflight = 0
        try:
            async with asyncio.timeout(_SETTLE_S):
                while True:
                    inflight = (await self._cluster.status()).inflight
                    if inflight == 0:
                        return
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise ClusterError(
                f"{inflight} requests were in flight {_SETTLE_S:g} s after their clients had left"
            ) from error


class _Model(msgspec.Struct):
    id: str
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Model]


async def max_model_len(url: str, model: str, key: str = "") -> int:
    """Return the context length that a server states.

    Raises:
        ClusterError: it does not answer.
    """
    limit = aiohttp.ClientTimeout(total=_REPLY_S)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, raise_for_status=True, headers=headers) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            listed = msgspec.json.decode(await response.read(), type=_Models)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        raise ClusterError(
            f"cannot read the context length from {url}/v1/models: {error!r}"
        ) from error
    return next(entry.max_model_len for entry in listed.data if entry.id == model)
