"""Drives a ModelRunner the way the engine does, with a trivial block allocator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import pytest
import torch

from pdserve.engine.kv.cache import KvCache
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.config import ModelConfig, load_model_config
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.plan.forms import ActivationDtype, form_of
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.steps.batch import StateTables
from pdserve.engine.weights.codings import native_plan
from pdserve.engine.weights.load import Progress, load_decoder, load_torch_weights
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import Checkpoint, resolve_checkpoint
from tests.native_attention import writing_attention
from tests.plain_batch import build_batch
from tests.requests import make_request

CPU = torch.device("cpu")


class DecoderKind(Enum):
    """Which decoder a test computes with."""

    SERVED = "served"  # that of a node: native on a CPU
    TORCH = "torch"


EACH_DECODER = pytest.mark.parametrize(
    "kind", DecoderKind, ids=lambda kind: kind.value, indirect=True
)


def load_torch_decoder(
    checkpoint: Checkpoint,
    plan: ModelPlan,
    dtype: ActivationDtype,
    device: torch.device,
    on_progress: Progress | None = None,
) -> TorchDecoder:
    """The plain decoder on any device: the oracle of the others."""
    weights = load_torch_weights(checkpoint, plan, dtype, device, on_progress)
    return TorchDecoder(plan.config, weights, writing_attention(device))


def make_prompt(num_tokens: int, seed: int = 0, vocab_size: int = 256) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()


@dataclass
class Node:
    """A loaded model with its pool. Blocks are handed out once, back to front."""

    model: Decoder
    kv_cache: KvCache
    runner: ModelRunner
    free: list[int] = field(default_factory=list)

    @classmethod
    def load(
        cls,
        path: Path,
        kind: DecoderKind = DecoderKind.SERVED,
        *,
        dtype: KvDtype = KvDtype.FLOAT32,
        block_size: int = 16,
        num_tokens: int = 8192,
        device: torch.device = CPU,
        change: Callable[[ModelConfig], ModelConfig] | None = None,
        kv_dtype: KvDtype | None = None,
        rounded_to: KvDtype | None = None,
        quantization: str = "none",
        kernels: str = "",
    ) -> Node:
        """`change`: of what the checkpoint says; `kv_dtype`, `rounded_to`: of KV, if others."""
        checkpoint = resolve_checkpoint(str(path))
        config = load_model_config(checkpoint)
        config = config if change is None else change(config)
        load = load_decoder if kind is DecoderKind.SERVED else load_torch_decoder
        form = form_of(quantization, ActivationDtype(dtype))
        is_native = kind is DecoderKind.SERVED and device == CPU
        plan = (
            native_plan(checkpoint, config, form) if is_native else ModelPlan.of(config, form=form)
        )
        activations = ActivationDtype(dtype)
        if is_native:
            model: Decoder = load_decoder(checkpoint, plan, activations, device, kernels=kernels)
        else:
            model = load(checkpoint, plan, activations, device)
        num_blocks = num_tokens // block_size + 64
        layout = config.kv_layout(block_size, kv_dtype or dtype, rounded_to)
        kv_cache = KvCache(layout, num_blocks, device)
        # What a block held before must never matter: NaN, also as a scale.
        kv_cache.pool.view(torch.uint8).fill_(255)
        return cls(model, kv_cache, ModelRunner(model, kv_cache), list(range(num_blocks)))

    def step(self, rows: Sequence[Scheduled]) -> list[SampledToken | None]:
        """One step as the engine does it: blocks, execute, advance."""
        for row in rows:
            request = row.request
            needed = self.kv_cache.layout.blocks_for(request.num_computed_tokens + row.num_tokens)
            while len(request.block_table) < needed:
                request.block_table.append(self.free.pop())
            while len(request.state_blocks) < self.kv_cache.layout.state_blocks:
                request.state_blocks.append(self.free.pop())
        sampled = self.runner.execute(rows)
        for row, token in zip(rows, sampled, strict=True):
            row.request.num_computed_tokens += row.num_tokens
            if token is not None:
                row.request.output_token_ids.append(token.token_id)
        return sampled

    def generate(self, requests: Sequence[Request], num_tokens: int, chunk: int = 10**6) -> None:
        """Run all requests together until each has `num_tokens` of output."""
        while True:
            rows = [
                Scheduled(request, min(chunk, request.num_uncomputed_tokens))
                for request in requests
                if len(request.output_token_ids) < num_tokens
            ]
            if not rows:
                return
            self.step(rows)

    def logits(
        self,
        token_ids: Sequence[int],
        *,
        is_long: bool = False,
        adapter: str = "",
        adapted_from: int = 0,
    ) -> torch.Tensor:
        """[num_tokens, vocab_size] of a sequence computed in one step."""
        request = make_request(
            token_ids, is_long=is_long, adapter=adapter, adapted_from=adapted_from
        )
        num_blocks = self.kv_cache.layout.blocks_for(len(token_ids))
        request.block_table = [self.free.pop() for _ in range(num_blocks)]
        batch = build_batch(
            [Scheduled(request, len(token_ids))],
            self.kv_cache.layout.block_size,
            CPU,
        )
        every_row = replace(batch, sampled_rows=torch.arange(len(token_ids)))
        if num_states := self.kv_cache.layout.state_blocks:
            table = torch.tensor([[self.free.pop() for _ in range(num_states)]])
            every_row = replace(every_row, state_tables=StateTables.own(table))
        with torch.inference_mode():
            logits = self.model.logits(every_row, self.kv_cache.pool)
        assert logits is not None
        return logits


def moved(request: Request, source: Node, target: Node) -> None:
    """Move what a request has in its blocks, as a handoff does, to a node of blocks alike."""
    before, after = (
        node.kv_cache.pool.view(torch.uint8).view(node.kv_cache.num_blocks, -1)
        for node in (source, target)
    )
    for blocks in (request.block_table, request.state_blocks):
        own = [target.free.pop() for _ in blocks]
        after[own] = before[blocks]
        blocks[:] = own
