"""All models that a coordinator serves: each one's nodes, and what the API knows of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Final

from coordinator.adapters.life import Adapters
from coordinator.admission.in_flight import InFlight
from coordinator.models.cascade import Cascade, make_cascades
from coordinator.models.cluster import ModelCluster
from coordinator.models.files import ModelFiles
from coordinator.models.lazy import LazyModel, TextSource
from coordinator.models.model import Catalog, Fingerprint, ListedModel, Model, make_model
from coordinator.models.text_files import TextKey
from coordinator.models.texts import Texts
from coordinator.nodes.registry import Member
from coordinator.pools.wakes import Coming, Wakes, needed_pools
from coordinator.requests.surroundings import FlowProcess
from coordinator.text.parts import ToolFormat
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import NodeState
from pdserve.protocol.status import AbsentNode, AdapterStatus, CoordinatorStatus, RoleName
from pdserve.settings.answers import AnswerConfig
from pdserve.settings.config import CoordinatorConfig
from pdserve.settings.models import read_models
from pdserve.settings.values import parse_adapters
from pdserve.shared.clock import Clock
from pdserve.shared.errors import ModelNotFound
from pdserve.shared.slo import ServiceClasses

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.01  # from a request that waits to a look at who should wake: one for many


class ServedModels:
    """Iterated over, it is the members of all models."""

    def __init__(
        self,
        config: CoordinatorConfig,
        all_files: Sequence[ModelFiles],
        classes: ServiceClasses,
        metrics: CoordinatorMetrics,
        clock: Clock,
        incarnation: str,
        *,
        share_quotas: Callable[[int], None],
        process: FlowProcess,
    ) -> None:
        """
        Args:
            all_files: of each model; the first one is meant where a call names none.
            metrics: the coordinator's; where it has several models, each has its own besides.
            share_quotas, process: as of ModelCluster.
        """
        self._on_load = process.on_load
        self.ready: Final = asyncio.Event()  # once a request for any of them could be served
        in_flight = InFlight(config.max_inflight)  # it bounds memory, so it is one for all
        is_one = len(all_files) == 1
        self._wakes = Wakes(needed_pools(config.mode))
        self.clusters: Final = [
            ModelCluster(
                config,
                files,
                classes,
                metrics if is_one else CoordinatorMetrics(is_whole=False),
                clock,
                incarnation,
                in_flight=in_flight,
                ready=self.ready,
                share_quotas=share_quotas,
                process=process if is_one else self._part(process, number),
                is_taken=partial(self._is_taken, number),
                coming=partial(self._coming, files.name),
                adapters={} if number else parse_adapters(config.checkpoint.adapters),
            )
            for number, files in enumerate(all_files)
        ]
        if not is_one:
            self._watch(metrics)
        for cluster in self.clusters:
            cluster.registry.on_joined(self._forget_absence)
        self._incarnation = incarnation
        self._next_look: asyncio.TimerHandle | None = None  # for those who wait
        self._look_due_s = inf  # when that is
        self._clock = clock
        self._loads = {cluster.name: (0, 0) for cluster in self.clusters}
        self._of_texts: dict[TextKey, list[ModelCluster]] = {}
        self._preparing: set[asyncio.Task[None]] = set()
        self.texts: Final = Texts(self._has_node)
        pairs = list(zip(all_files, self.clusters, strict=True))
        models: list[ListedModel] = [_model(*pairs[0], config.answers)] if is_one else []
        if not is_one:
            models = [_lazy_model(*pair, config.answers, self.texts) for pair in pairs]
            for pair in pairs:
                self._prepare_with_nodes(*pair)
        self.catalog: Final = Catalog(models, _cascades(config.models) if config.models else ())

    def __iter__(self) -> Iterator[Member]:
        return (member for cluster in self.clusters for member in cluster.registry)

    @property
    def metrics(self) -> dict[str, CoordinatorMetrics]:
        """Each model's own metrics by its name; empty where there is one model."""
        several = len(self.clusters) > 1
        return {cluster.name: cluster.metrics for cluster in self.clusters} if several else {}

    @property
    def num_inflight(self) -> int:
        """Number of requests for all models that have started and not ended."""
        return sum(cluster.flow.num_inflight for cluster in self.clusters)

    def of_node(self, node_id: str) -> ModelCluster:
        """Return the cluster that a node is a member of; the first one, if it is of none."""
        return next((c for c in self.clusters if c.registry.find(node_id)), self.clusters[0])

    def of_name(self, name: str | None) -> ModelCluster:
        """Return the cluster of the model that this name means; None: the first one.

        Raises ModelNotFound.
        """
        found = [c for c in self.clusters if name is None or name in c.names]
        if not found:
            raise ModelNotFound(f"there is no model {name!r}", "model")
        return found[0]

    def adapters_of(self, name: str | None) -> Adapters:
        """Return the adapters of the model that this name means. Raises ModelNotFound."""
        return self.of_name(name).adapters

    def adapters_with(self, name: str) -> Adapters | None:
        """Return the adapters that one of this name is among; None: there is none."""
        return next((c.adapters for c in self.clusters if name in c.adapters.known), None)

    def adapter_states(self) -> list[AdapterStatus]:
        """Return what there is to tell of all adapters, by name."""
        states = [state for cluster in self.clusters for state in cluster.adapters.states()]
        return sorted(states, key=lambda state: state.name)

    def absent(self) -> list[AbsentNode]:
        """Return the nodes that are missed, each once, those first that are missed for longest."""
        missed = {node.node_id: node for c in self.clusters for node in c.absent.nodes()}
        return sorted(missed.values(), key=lambda node: -node.since_s)

    def desired_nodes(self) -> dict[RoleName, int]:
        """Return how many nodes each pool should have, of all models together."""
        total: dict[RoleName, int] = {}
        for cluster in self.clusters:
            for role, number in cluster.pools.desired_nodes().items():
                total[role] = total.get(role, 0) + number
        return total

    def look(self) -> None:
        """Have nodes become those of the models that need them more."""
        clusters = self.clusters
        leads = all(cluster.registry.are_led_by(self._incarnation) for cluster in clusters)
        if len(clusters) == 1:
            return
        models, now_s = [c.now() for c in clusters], self._clock.now()
        if not leads:
            self._wakes.watch(models, now_s)
        for order in self._wakes.decide(models, now_s, leads=leads):
            member = self.of_node(order.node_id).registry.find(order.node_id)
            if member is not None:
                log.info("%s is to become a node of %s", order.node_id, order.model)
                member.drain(become=order.model)
        for cluster in clusters:
            if refused_s := self._wakes.refused_s(cluster.name, now_s):
                cluster.flow.refuse_line(refused_s)
        self._look_in(self._wakes.again_s - now_s)

    def _forget_absence(self, member: Member) -> None:
        for cluster in self.clusters:
            cluster.absent.forget(member.node_id)

    def _look_in(self, seconds: float) -> None:
        """Look then at the latest."""
        due_s = self._clock.now() + seconds
        if due_s >= self._look_due_s:
            return
        if self._next_look is not None:
            self._next_look.cancel()
        self._look_due_s = due_s
        self._next_look = asyncio.get_running_loop().call_later(seconds, self._look_now)

    def _look_now(self) -> None:
        self._next_look, self._look_due_s = None, inf
        self.look()

    async def begin(self) -> None:
        """Start what makes prompts, while nodes are still loading; of several models, with them."""
        if isinstance(model := self.catalog.default, Model):
            await model.tokenizer.begin()

    def _prepare_with_nodes(self, files: ModelFiles, cluster: ModelCluster) -> None:
        """Have a model's tokenizer there as long as it has nodes."""
        self._of_texts.setdefault(files.text.key, []).append(cluster)

        def joined(_: Member) -> None:
            preparing = asyncio.create_task(self.texts.prepare(files.text))
            self._preparing.add(preparing)
            preparing.add_done_callback(self._preparing.discard)

        cluster.registry.on_joined(joined)
        cluster.registry.on_lost(lambda _: self.texts.trim())

    def _has_node(self, key: TextKey) -> bool:
        return any(any(True for _ in cluster.registry) for cluster in self._of_texts[key])

    def _is_taken(self, number: int, name: str) -> bool:
        """Whether a name means a model, or an adapter of another model than this one."""
        others = [cluster for index, cluster in enumerate(self.clusters) if index != number]
        is_model = any(name in cluster.names for cluster in self.clusters)
        return is_model or any(name in cluster.adapters.known for cluster in others)

    def _coming(self, name: str) -> Coming | None:
        """When a node wakes as this model; None also if none can, or one of its own is loading."""
        coming = self._wakes.coming(name, self._clock.now())
        if coming is None or coming.is_ordered:
            return coming
        is_loading = any(
            member.load.state is NodeState.LOADING for member in self.of_name(name).registry
        )
        may_wake = any(member.is_ready and name in member.hello.may_become for member in self)
        return coming if may_wake and not is_loading else None

    def _watch(self, metrics: CoordinatorMetrics) -> None:
        metrics.count_each(
            "wakes", "Nodes told to become one of a model", "model", lambda: self._wakes.num_ordered
        )
        times = self._wakes.times
        metrics.watch_each(
            "wake_seconds",
            "What a wake as one of a model is expected to take",
            "model",
            lambda: {cluster.name: times.expected_s(cluster.name) for cluster in self.clusters},
        )

    def _part(self, process: FlowProcess, number: int) -> FlowProcess:
        """What one of several models is told of the process; the first one tells of it."""
        return replace(
            process,
            on_load=partial(self._load_changed, number),
            describe=CoordinatorStatus if number else process.describe,
        )

    def _load_changed(self, number: int, inflight: int, waiting: int) -> None:
        """A place that one model's request has left may be what another's waits for."""
        self._loads[self.clusters[number].name] = inflight, waiting
        sums = [sum(numbers) for numbers in zip(*self._loads.values(), strict=True)]
        self._on_load(sums[0], sums[1])
        if sums[1]:  # also what has ended may leave a node to those who wait for another model
            self._look_in(_LOOK_S)
        if sums[1] > waiting:
            for cluster in self.clusters:
                cluster.flow.look()


def _cascades(models: str) -> list[Cascade]:
    file = read_models(models)
    return make_cascades(file.cascades, file.external)


def _model(files: ModelFiles, cluster: ModelCluster, answers: AnswerConfig) -> Model:
    """Return the only model, whose tokenizer is loaded at once. Raises ModelError."""
    tokenizer = files.text.load()
    return make_model(
        cluster.flow,
        tokenizer,
        files.names,
        tool_format=_tool_format(answers),
        embedding=files.embedding,
        scoring=files.scoring(tokenizer),
        sampling=files.sampling,
        tenants=files.tenants,
        adapters=cluster.adapters,
        price=files.price,
    )


def _lazy_model(
    files: ModelFiles, cluster: ModelCluster, answers: AnswerConfig, texts: Texts
) -> LazyModel:
    return LazyModel(
        names=tuple(files.names),
        created=int(time.time()),
        fingerprint=Fingerprint(files.name),
        generator=cluster.flow,
        embedding=files.embedding,
        sampling=files.sampling,
        tenants=files.tenants,
        adapters=cluster.adapters,
        price=files.price,
        source=TextSource(texts, files, _tool_format(answers)),
    )


def _tool_format(answers: AnswerConfig) -> ToolFormat | None:
    wanted = answers.tool_format
    return None if wanted == "auto" else ToolFormat(wanted)
