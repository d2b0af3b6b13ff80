"""Decoders on torch of several ranks, each in a thread of this process, which meet by gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.config import ModelConfig, load_model_config
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.parameters import DecoderWeights
from pdserve.engine.plan.forms import FORMS, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.ranks.collectives import Collectives
from pdserve.engine.ranks.process_group import join_ranks
from pdserve.engine.ranks.shard import Shard, check_ranks
from pdserve.engine.ranks.sizes import Parallelism
from pdserve.engine.steps.batch import Batch
from pdserve.engine.weights.load import load_torch_weights
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.unit.engine_model.harness import Node

CPU = torch.device("cpu")
T = TypeVar("T")
MakeDecoder = Callable[[ModelConfig, DecoderWeights, Collectives], Decoder]


class InTurn:
    """Collectives of a thread that computes alone: Triton's interpreter has global state.

    It also counts what is asked of it.
    """

    def __init__(self, ranks: Collectives, computing: threading.Lock) -> None:
        self.shard = ranks.shard
        self.calls: list[str] = []
        self._ranks = ranks
        self._computing = computing

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.calls.append("all_reduce")
        return self._meet(lambda: self._ranks.all_reduce(tensor))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        self.calls.append("gather")
        return self._meet(lambda: self._ranks.gather(tensor))

    def broadcast(self, tensor: Tensor) -> Tensor:
        self.calls.append("broadcast")
        return self._meet(lambda: self._ranks.broadcast(tensor))

    def send(self, tensor: Tensor) -> None:
        self.calls.append("send")
        self._meet(lambda: self._ranks.send(tensor))

    def receive(self, tensor: Tensor) -> Tensor:
        self.calls.append("receive")
        return self._meet(lambda: self._ranks.receive(tensor))

    def largest(self, number: int) -> int:
        self.calls.append("largest")
        return self._meet(lambda: self._ranks.largest(number))

    def agree(self, what: str, choose: Callable[[], str]) -> str:
        return self._meet(lambda: self._ranks.agree(what, choose))

    def _meet(self, collective: Callable[[], T]) -> T:
        self._computing.release()
        try:
            return collective()
        finally:
            self._computing.acquire()


class ThreadedRanks:
    """Implements Decoder: rank 0's, and beside it those of the others, on the same batch."""

    def __init__(
        self, decoders: list[Decoder], pools: list[KvCache], computing: threading.Lock
    ) -> None:
        self.config, self.dtype = decoders[0].config, decoders[0].dtype
        self.device, self.sampler = CPU, decoders[0].sampler
        self._has_stages = pools[0].layout.num_layers < self.config.num_layers
        self.num_ahead = 0  # steps that take their tokens from the one before
        self._decoders = decoders
        self._pools = pools
        self._computing = computing
        self._threads = ThreadPoolExecutor(len(decoders), "rank")

    @property
    def most_ahead(self) -> int:
        return self._decoders[0].most_ahead

    def take_adapter(self, adapter: Adapter) -> None:
        for decoder in self._decoders:
            decoder.take_adapter(adapter)

    def drop_adapter(self, digest: str) -> None:
        for decoder in self._decoders:
            decoder.drop_adapter(digest)

    def logits(
        self, batch: Batch, kv_pool: Tensor, progress: LayerProgress | None = None
    ) -> Tensor | None:
        assert kv_pool is self._pools[0].pool
        self.num_ahead += batch.sampled_before is not None
        silent = None if progress is None else LayerProgress([], lambda _: None)

        def compute(rank: int) -> Tensor | None:
            pool, heard = self._pools[rank].pool, silent if rank else progress
            # Only rank 0 samples, and knows what it has sampled; of one stage, it alone has taps.
            own = batch if rank == 0 else replace(batch, cargo=None, sampled_before=None)
            if rank and batch.taps is not None:
                out = torch.full_like(batch.taps.out, torch.nan)
                taps = replace(batch.taps, out=out) if self._has_stages else None
                own = replace(own, taps=taps)
            with self._computing, torch.inference_mode():
                return self._decoders[rank].logits(own, pool, heard)

        logits, *_ = self._threads.map(compute, range(len(self._decoders)))
        return logits

    def close(self) -> None:
        self._threads.shutdown()


@contextmanager
def threaded_node(
    path: Path,
    num_ranks: int,
    make: MakeDecoder,
    *,
    num_stages: int = 1,
    dtype: KvDtype = KvDtype.FLOAT32,
    block_size: int = 16,
    num_blocks: int = 600,
) -> Iterator[tuple[Node, list[InTurn]]]:
    """A node of these ranks; each has loaded its share, and has a pool of its own."""
    checkpoint = resolve_checkpoint(str(path))
    config = load_model_config(checkpoint)
    parallelism = Parallelism(num_ranks, num_stages)
    check_ranks(config, parallelism)
    shards = [Shard.of_rank(rank, parallelism) for rank in range(parallelism.num_ranks)]
    layouts = config.kv_layout(block_size, dtype).parts(num_ranks, num_stages)
    store, computing = dist.HashStore(), threading.Lock()
    with ThreadPoolExecutor(len(shards)) as threads:
        joined = threads.map(lambda shard: join_ranks(store, shard, CPU, lambda: None), shards)
        ranks = [InTurn(each, computing) for each in joined]
    decoders, pools = [], []
    for shard, rank, layout in zip(shards, ranks, layouts, strict=True):
        plan = ModelPlan.of(config, shard, FORMS[dtype])
        weights = load_torch_weights(checkpoint, plan, ActivationDtype(dtype), CPU)
        decoders.append(make(config, weights, rank))
        pools.append(KvCache(layout, num_blocks, CPU))
        pools[-1].pool.fill_(float("nan"))  # what a block held before must never matter
    model = ThreadedRanks(decoders, pools, computing)
    try:
        yield Node(model, pools[0], ModelRunner(model, pools[0]), list(range(num_blocks))), ranks
    finally:
        model.close()
