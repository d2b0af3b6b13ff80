"""A GPU gets the fastest attentions that compute what they should: for prompts and for decodes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pdserve.engine.attention import AttentionBatch, LayerKv
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda.attention.catalog import AttentionKind, AttentionNeeds
from pdserve.engine.cuda.attention.race import Fastest, RacedBatches, fastest_attention, opened
from tests.fakes.graphs import Recorded, Replayed
from tests.unit.engine_cuda.test_probe import Elsewhere, Near, Wrong, WrongDecodes

CPU = torch.device("cpu")
NEEDS = AttentionNeeds(torch.float32, 16)


class Named(ReferenceAttention):
    """One whose time is known: `prompt_s`, and `decode_s` in a graph."""

    def __init__(self, name: str, prompt_s: float, decode_s: float | None = None) -> None:
        self.name = name
        self.prompt_s = prompt_s
        self.decode_s = decode_s

    def attend_decode(self, query: Tensor, kv: LayerKv, batch: AttentionBatch) -> Tensor:
        if self.decode_s is None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.attend(query, kv, batch)

    def kind(self, *, is_captured: bool = True) -> AttentionKind:
        return AttentionKind(
            self.name,
            lambda: None,
            lambda needs: None,
            lambda device: self,
            (lambda device: self) if is_captured else None,
        )


class Uncompiled(Named):
    """Imports, and then cannot compile."""

    def attend(self, query: Tensor, kv: LayerKv, batch: AttentionBatch, *_: Any) -> Tensor:
        raise OSError("nvcc: not found")


class Small(Named):
    """Passes the checks, which have a context of 33 tokens, and raises at what is measured."""

    def attend(self, query: Tensor, kv: LayerKv, batch: AttentionBatch, *place: Any) -> Tensor:
        if batch.context_lens.max() < 33:
            raise MemoryError("no workspace")
        return super().attend(query, kv, batch, *place)


class Layered(Named):
    """Sees which pools it reads, layer by layer."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 1.0, 1.0)
        self.layers: list[tuple[int, int]] = []  # which one, of how many

    def attend(self, query: Tensor, kv: LayerKv, batch: AttentionBatch, *place: Any) -> Tensor:
        self.layers.append((kv.layer, kv.pool.shape[1]))
        return super().attend(query, kv, batch, *place)


class Known:
    """As Stopwatch: what is known of the backend whose work it is."""

    def seconds(self, work: Callable[[], object]) -> float:
        work()
        replayed = getattr(work, "__self__", None)
        if isinstance(replayed, Replayed):
            return replayed.work.args[0].__self__.decode_s
        return work.args[0].__self__.prompt_s


SHORT = RacedBatches((((2, 5),),), (((1, 5),), ((1, 3), (1, 2))))


def race(
    *kinds: AttentionKind,
    has_graphs: bool = True,
    needs: AttentionNeeds = NEEDS,
    batches: RacedBatches = SHORT,
) -> Fastest:
    candidates = (*kinds, Named("last", 0.0, 0.0).kind())
    recorder = Recorded if has_graphs else None
    return fastest_attention(needs, CPU, Known(), recorder, candidates, batches)


def test_prompts_and_decodes_have_winners_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    quick, graphs = Named("quick", 1e-6, 5e-6), Named("graphs", 2e-6, 3e-6)
    eager = Named("eager", 0.5e-6)
    with caplog.at_level(logging.INFO):
        found = race(graphs.kind(), quick.kind(), eager.kind(is_captured=False))
    assert found == Fastest(eager, graphs)
    assert "attention for decodes is graphs, measured: graphs 6 µs, quick 10 µs" in caplog.text
    assert race(graphs.kind(), quick.kind(), has_graphs=False) == Fastest(quick, None)
    assert race(eager.kind(is_captured=False)) == Fastest(eager, None)


def test_what_does_not_work_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    slow = Named("slow", 1.0, 1.0)
    kinds = (
        Uncompiled("uncompiled", 0.0).kind(),
        Named.kind(Wrong(), is_captured=False),
        Named.kind(Elsewhere(), is_captured=False),
        slow.kind(),
    )
    assert race(*kinds) == Fastest(slow, slow)
    assert "nvcc: not found" in caplog.text
    assert "wrong is off by" in caplog.text
    assert "elsewhere, told where its result goes, is off by" in caplog.text


def test_what_cannot_be_captured_after_all_does_not_win(caplog: pytest.LogCaptureFixture) -> None:
    refusing, slow = Named("refusing", 1e-6, None), Named("slow", 2e-6, 9.0)
    assert race(refusing.kind(), slow.kind()) == Fastest(refusing, slow)
    assert "not permitted when stream is capturing" in caplog.text
    assert race(refusing.kind()) == Fastest(refusing, None)


def test_decodes_that_are_wrong_do_not_win(caplog: pytest.LogCaptureFixture) -> None:
    wrong, slow = WrongDecodes(), Named("slow", 2e-6, 9.0)
    wrong.prompt_s, wrong.decode_s = 1e-6, 1e-6
    assert race(Named.kind(wrong), slow.kind()) == Fastest(wrong, slow)
    assert "wrong_decodes in a graph is off by" in caplog.text
    assert race(Named.kind(wrong)) == Fastest(wrong, None)


def test_windows_that_are_wrong_do_not_win() -> None:
    near, slow = Near(1), Named("slow", 2e-6, 9.0)
    near.prompt_s, near.decode_s = 1e-6, 1e-6
    windowed = dataclasses.replace(NEEDS, windows=(4096,))
    assert race(Named.kind(near), slow.kind()) == Fastest(near, near)
    assert race(Named.kind(near), slow.kind(), needs=windowed) == Fastest(slow, slow)


def test_none_of_those_that_cannot_be_measured_wins(caplog: pytest.LogCaptureFixture) -> None:
    small = [Small(name, 1.0, 1.0) for name in ("one", "two")]
    found = race(*(one.kind() for one in small))
    assert found.prompts.name == "last"
    assert found.decodes is None
    assert "attention by one cannot compute prompts here" in caplog.text
    assert "attention by two cannot compute decodes here" in caplog.text


def test_other_ranks_open_the_winners_by_their_names() -> None:
    quick, graphs = Named("quick", 1.0), Named("graphs", 2.0, 1.0)
    kinds = (quick.kind(is_captured=False), graphs.kind())
    assert race(*kinds).names == "quick graphs"
    assert opened("quick graphs", CPU, kinds) == Fastest(quick, graphs)
    assert opened(race(kinds[0]).names, CPU, kinds) == Fastest(quick, None)


def test_the_last_one_runs_if_no_other_does() -> None:
    found = race(Uncompiled("uncompiled", 0.0).kind())
    assert found.prompts.name == "last"
    assert found.decodes is None


@pytest.mark.parametrize(("num_bytes", "num_layers"), [(1, 1), (2561, 3), (1 << 30, 4)])
def test_layers_take_turns_in_a_pool_that_no_cache_holds(num_bytes: int, num_layers: int) -> None:
    """A context of 5 tokens has 1280 bytes of KV a layer."""
    layered, other = Layered("layered"), Named("other", 1.0, 1.0)
    needs = dataclasses.replace(NEEDS, windows=(None,) * 4)
    cold = dataclasses.replace(SHORT, cold_bytes=num_bytes)
    race(layered.kind(), other.kind(), needs=needs, has_graphs=False, batches=cold)
    _, _, *measured = layered.layers  # behind the check
    assert measured == [(index % num_layers, num_layers) for index in range(4)]
