"""Pools that give blocks back once windows have passed them: the same tokens, from fewer blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from pdserve.engine.core import EngineCore
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.kv import KvDtype, KvLayout
from pdserve.kv.companions import windows_worth_it
from pdserve.shared.clock import ManualClock
from pdserve.shared.pooling import Pooling
from tests.fakes.runner import decode_policy
from tests.matrix import matrix
from tests.requests import make_request, work_of
from tests.unit.engine_model.drafted import Told
from tests.unit.engine_model.harness import CPU, DecoderKind, Node, make_prompt

BLOCK = 8
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {}),
    "gpt-oss": ("gpt_oss", {}),
    "cohere2": ("cohere2", {}),
    "all layers with windows": ("mistral", {"sliding_window": 24}),
}


class Served:
    """A core over a pool, whose blocks are NaN from the moment that nobody may read them."""

    def __init__(
        self, node: Node, num_blocks: int, *, gives_back: bool, prefix_cache: bool = False
    ) -> None:
        config = node.model.config
        layout = config.kv_layout(BLOCK, node.kv_cache.layout.dtype)
        if gives_back:
            layout = replace(layout, windows=windows_worth_it(config.sliding_windows, 4096))
            assert layout.num_companions > 0
        self.layout = layout
        self.cache = KvCache(layout, num_blocks, CPU)
        self._bytes = self.cache.pool.view(torch.uint8)
        self._bytes.fill_(255)
        self.pool = BlockPool(
            num_blocks,
            BLOCK,
            prefix_cache=prefix_cache,
            bump_generations=(lambda ids: None) if prefix_cache else self._spoil,
            windows=[window for window in config.sliding_windows if window],
            companions=self.cache.companions,
        )
        self.runner = ModelRunner(node.model, self.cache, frozenset())
        self.core = EngineCore(Queues(self.pool, ManualClock()), decode_policy(23, 8), frozenset())
        self.most_used = 0

    def _spoil(self, block_ids: Sequence[int]) -> None:
        self._bytes[list(block_ids)] = 255

    def run(self, requests: Sequence[Request], most_steps: int = 2000) -> list[list[int]]:
        for request in requests:
            self.core.submit(request)
        self.steps(most_steps)
        assert not self.core.num_requests
        return [request.output_token_ids for request in requests]

    def steps(self, count: int) -> None:
        for _ in range(count):
            rows = self.core.begin_step()
            if not rows:
                return
            sampled = self.core.accepted(rows, self.runner.execute(rows))
            for request in self.core.end_step(rows, sampled, 0.0):
                self.core.forget(request)
            self.pool.check_integrity()


@pytest.fixture
def node(checkpoint_of: Callable[..., Path], kind: DecoderKind) -> Node:
    return Node.load(checkpoint_of("gemma3"), kind)


def requests(count: int = 4, num_prompt: int = 130, num_output: int = 60) -> list[Request]:
    return [
        make_request(
            make_prompt(num_prompt - 17 * number, number),
            request_id=str(number),
            max_tokens=num_output,
            **({"temperature": 0.8, "seed": 5} if number % 2 else {}),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("family", matrix(FAMILIES, 2))
def test_what_windows_have_passed_is_not_read_any_more(
    checkpoint_of: Callable[..., Path], kind: DecoderKind, family: str
) -> None:
    name, changes = FAMILIES[family]
    node = Node.load(checkpoint_of(name, **changes), kind)
    plain = Served(node, 200, gives_back=False).run(requests())
    served = Served(node, 800, gives_back=True)
    assert served.run(requests()) == plain
    assert served.pool.num_free == served.pool.num_blocks


def test_a_block_given_back_too_early_is_noticed(
    checkpoint_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node.load(checkpoint_of("gemma3"), DecoderKind.SERVED)
    passed = BlockPool.num_passed
    too_many = BLOCK + 1  # of what a border needs besides, and one token
    monkeypatch.setattr(BlockPool, "num_passed", lambda pool, n: passed(pool, n + too_many))
    with pytest.raises(ValueError, match="windows reach their tokens"):
        Served(node, 800, gives_back=True).run(requests())


def test_preempted_streams_go_on(node: Node) -> None:
    plain = Served(node, 200, gives_back=False).run(requests())
    served = Served(node, 800, gives_back=True)
    own = requests()
    for request in own:
        served.core.submit(request)
    served.steps(40)
    for request in (own[0], own[2]):
        assert request.is_decoding
        assert request.num_passed > 0
        served.core.queues.preempt(request)
    served.steps(2000)
    assert [request.output_token_ids for request in own] == plain
    assert served.pool.num_free == served.pool.num_blocks


def test_right_and_wrong_drafts_change_nothing(node: Node) -> None:
    from pdserve.engine.drafts.speculation import Speculation

    answers = Served(node, 200, gives_back=False).run(requests())
    told = Told({str(number): answer for number, answer in enumerate(answers)}, 0)
    served = Served(node, 800, gives_back=True)
    served.core.speculate = Speculation(served.pool, lambda shape: 1.0, 256, [told])
    assert served.run(requests()) == answers


def test_prompts_are_scored_and_pooled_in_parts(node: Node) -> None:
    def asked() -> list[Request]:
        scored = make_request(make_prompt(130), prompt_logprobs=3, max_tokens=4)
        pooling = Pooling.MEAN
        pooled = make_request(make_prompt(90, 2), request_id="2", max_tokens=0, pooling=pooling)
        return [scored, pooled]

    plain, own = asked(), asked()
    five_rows = 5 * 4 * node.model.config.vocab_size
    for served, wanted in (
        (Served(node, 200, gives_back=False), plain),
        (Served(node, 800, gives_back=True), own),
    ):
        served.runner = ModelRunner(node.model, served.cache, scored_logits_bytes=five_rows)
        served.run(wanted)
    assert [each.output_token_ids for each in own] == [each.output_token_ids for each in plain]
    assert work_of(own[0]).logprobs == work_of(plain[0]).logprobs
    assert len(work_of(own[0]).logprobs) == 129
    assert work_of(own[1]).embedding == work_of(plain[1]).embedding


def test_a_prefix_ends_where_its_windows_are_still_there(node: Node) -> None:
    """What streams have passed stays for others until its blocks are needed; then less is found."""
    prompt = make_prompt(160, 77)

    def asked(end: int, number: int) -> Request:
        own = prompt[:end] + make_prompt(9, number)
        return make_request(own, request_id=str(number), max_tokens=5)

    plain = Served(node, 200, gives_back=False)
    expected = plain.run([asked(end, end) for end in (160, 96, 41)])
    served = Served(node, 7 * 40, gives_back=True, prefix_cache=True)
    first = asked(160, 160)
    assert served.run([first]) == expected[:1]
    hit = asked(96, 96)
    assert served.run([hit]) == expected[1:2]
    assert hit.num_cached_tokens == 96
    served.run(requests(3, 150, 30))  # takes the blocks of windows that nobody sees
    cut = asked(41, 41)
    assert served.run([cut]) == expected[2:]
    assert served.pool.num_free == served.pool.num_blocks


def test_a_long_context_of_gemmas_shape_takes_three_tenths() -> None:
    windows = (512,) * 5 + (0,)
    dtype = KvDtype.BFLOAT16
    kept = KvLayout.gqa(layers=18, heads=1, head_dim=256, block_size=16, dtype=dtype)
    layout = replace(kept, windows=windows * 3)
    kv_bytes = []
    for each in (kept, layout):
        cache_bytes = each.block_bytes * (1 + each.num_companions)
        assert cache_bytes == kept.block_bytes
        pool = BlockPool(
            2000 * (1 + each.num_companions),
            16,
            prefix_cache=False,
            windows=[512],
            companions=None
            if not each.num_companions
            else KvCache(each, 12000, torch.device("meta")).companions,
        )
        queues = Queues(pool, ManualClock())
        request = make_request([1] * 4096, max_tokens=10)
        queues.submit(request)
        assert queues.admit(request)
        request.num_computed_tokens = 4096
        queues.pass_windows(request, 4096)
        kv_bytes.append((pool.num_blocks - pool.num_free) * cache_bytes)
        assert kv_bytes[-1] <= (each.blocks_held(4096) + 5) * each.block_bytes
    assert kv_bytes[1] <= 0.3 * kv_bytes[0]
