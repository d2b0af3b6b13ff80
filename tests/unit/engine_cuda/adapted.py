"""Adapters in CudaDecoder, as tests of what is interpreted and of what is compiled look at them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pdserve.engine.adapters.adapter import Adapter, LowRank
from pdserve.engine.adapters.read import read_adapter
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda.attention.triton_attention import TritonAttention
from pdserve.engine.cuda.copies.staging import HostCopies, Staging
from pdserve.engine.cuda.decoder import CudaDecoder
from pdserve.engine.cuda.layers.adapters import add_low_rank, packed
from pdserve.engine.models.config import load_model_config
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.plan.model import ModelPlan
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.adapters import ALL_LINEAR, make_adapter
from tests.checkpoints import make_checkpoint
from tests.requests import make_request
from tests.unit.engine_cuda.decoders import make_node, random_weights
from tests.unit.engine_model.harness import Node, make_prompt

CPU = torch.device("cpu")
PREFIX = "base_model.model."
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPTS = [make_prompt(n, seed=n) for n in (9, 3, 2, 4, 6)]


def nodes_of(base: Path, device: torch.device, copies: HostCopies) -> tuple[Node, Node]:
    """The same weights in the decoder in plain torch, on the CPU, and in the other one."""
    config = load_model_config(resolve_checkpoint(str(base)))
    oracle = TorchDecoder(config, random_weights(config, torch.float32, CPU), ReferenceAttention())
    weights = random_weights(config, torch.float32, device)
    cuda = CudaDecoder(config, weights, TritonAttention(), Staging(copies), None)
    return make_node(oracle), make_node(cuda)


def taken(nodes: Sequence[Node], base: Path, *folders: Path) -> list[Adapter]:
    """Read them, and have the nodes take them."""
    plan, checkpoint = ModelPlan.of(nodes[0].model.config), resolve_checkpoint(str(base))
    adapters = [read_adapter(folder, plan, checkpoint=checkpoint) for folder in folders]
    for node in nodes:
        for adapter in adapters:
            node.model.take_adapter(adapter)
    return adapters


def said(node: Node, adapters: Sequence[Adapter], chunk: int = 7) -> list[list[int]]:
    """What is said with each of them, and without, all at once."""
    digests = ["", *(adapter.digest for adapter in adapters)]
    requests = [
        make_request(prompt, request_id=str(n), adapter=digest, adapted_from=n)
        for n, (prompt, digest) in enumerate(zip(PROMPTS, digests, strict=False))
    ]
    node.generate(requests, 2, chunk)
    return [request.output_token_ids for request in requests]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_mix(folder: Path, device: torch.device, copies: HostCopies) -> None:
    """Of all that an adapter may have, each in some of them."""
    base = make_checkpoint(folder / "base", "llama", **SIZES)
    nodes = nodes_of(base, device, copies)
    config = nodes[0].model.config
    vocab, hidden = config.vocab_size, config.hidden_size
    head = {
        f"{PREFIX}lm_head.lora_A.weight": normal(3, hidden, seed=1),
        f"{PREFIX}lm_head.lora_B.weight": normal(vocab, 3, seed=2),
        f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": normal(
            2, hidden, seed=3
        ),
    }
    adapters = taken(
        nodes,
        base,
        make_adapter(folder / "wide", base, modules=("q_proj", "v_proj"), rank=19),
        make_adapter(folder / "bias", base, rank=3, seed=1, lora_bias=True),
        make_adapter(folder / "dora", base, modules=ALL_LINEAR, rank=5, seed=2, use_dora=True),
        make_adapter(
            folder / "ends",
            base,
            modules=("down_proj",),
            rank=3,
            seed=3,
            own=head,
            trainable_token_indices={"embed_tokens": [PROMPTS[4][4], PROMPTS[4][5]]},
        ),
    )
    torch_node, cuda = nodes
    expected = said(torch_node, adapters)
    assert len(set(map(tuple, expected))) == len(expected), "each says something else"
    assert said(cuda, adapters) == expected
    cuda.model.drop_adapter(adapters[0].digest)
    (again,) = taken([cuda], base, folder / "wide")
    assert said(cuda, [again]) == expected[:2]


def check_bits(device: torch.device) -> None:
    """Those of a row do not depend on its batch."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    parts = [LowRank(some(r, 70), some(33, r), some(33), some(33)) for r in (3, 20)]
    made = [packed([(slice(33), part)], 33, torch.float32, device) for part in parts]
    table = torch.tensor([each.entry for each in made], device=device)
    x, y, bias = some(24, 70), some(24, 33), some(33)

    def added(numbers: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
        out = y.clone()
        rows = torch.tensor(numbers, dtype=torch.int32, device=device)
        own = torch.tensor(slots, dtype=torch.int32, device=device)
        add_low_rank(table, rows, own, 32, x, out, bias)
        return out

    first, second = [*range(16)], [*range(16, 24), *[-1] * 8]
    together = added([*first, *second], [0, 1])
    for part, rows in zip(parts, (slice(16), slice(16, 24)), strict=True):
        base = (y[rows] - bias) * part.factors + bias + part.bias
        assert torch.allclose(together[rows], base + x[rows] @ part.a.T @ part.b.T, atol=1e-4)
    alone = added([7, *[-1] * 15], [0])
    assert torch.equal(alone[7], together[7])
    assert torch.equal(alone[8:], y[8:])
