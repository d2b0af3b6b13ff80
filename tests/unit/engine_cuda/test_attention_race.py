"""A GPU gets the fastest attentions that compute what they should: for prompts and for decodes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda import attention_race
from pdserve.engine.cuda.attention_race import Fastest, fastest_attention
from pdserve.engine.cuda.catalog import AttentionKind, AttentionNeeds
from tests.unit.engine_cuda.replayed import Recorded, Replayed
from tests.unit.engine_cuda.test_probe import Wrong

CPU = torch.device("cpu")
NEEDS = AttentionNeeds(torch.float32, 16)


class Named(ReferenceAttention):
    """One whose time is known: `prompt_s`, and `decode_s` in a graph."""

    def __init__(self, name: str, prompt_s: float, decode_s: float | None = None) -> None:
        self.name = name
        self.prompt_s = prompt_s
        self.decode_s = decode_s

    def attend_decode(self, *arguments: Any, **fields: Any) -> Tensor:
        if self.decode_s is None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.attend(*arguments, **fields)

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

    def attend(self, *arguments: Any, **fields: Any) -> Tensor:
        raise OSError("nvcc: not found")


class Known:
    """As Stopwatch: what is known of the backend whose work it is."""

    def seconds(self, work: Callable[[], object]) -> float:
        work()
        replayed = getattr(work, "__self__", None)
        if isinstance(replayed, Replayed):
            return replayed.work.args[0].__self__.decode_s
        return work.args[0].__self__.prompt_s


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_race, "PROMPTS", (((2, 5),),))
    monkeypatch.setattr(attention_race, "DECODES", (((1, 5),), ((1, 3), (1, 2))))


def race(*kinds: AttentionKind, has_graphs: bool = True) -> Fastest:
    last = Named("last", 0.0, 0.0).kind()
    return fastest_attention(NEEDS, CPU, Known(), Recorded if has_graphs else None, (*kinds, last))


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
    slow, wrong = Named("slow", 1.0, 1.0), Wrong()
    kinds = (
        Uncompiled("uncompiled", 0.0).kind(),
        Named.kind(wrong, is_captured=False),
        slow.kind(),
    )
    assert race(*kinds) == Fastest(slow, slow)
    assert "nvcc: not found" in caplog.text
    assert "wrong is off by" in caplog.text


def test_what_cannot_be_captured_after_all_does_not_win(caplog: pytest.LogCaptureFixture) -> None:
    refusing, slow = Named("refusing", 1e-6, None), Named("slow", 2e-6, 9.0)
    assert race(refusing.kind(), slow.kind()) == Fastest(refusing, slow)
    assert "attention by refusing cannot compute decodes here" in caplog.text


def test_the_last_one_runs_if_no_other_does() -> None:
    assert race(Uncompiled("uncompiled", 0.0).kind()).prompts.name == "last"
