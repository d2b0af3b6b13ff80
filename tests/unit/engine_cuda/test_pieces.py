"""Pieces of steps compute what launching the same step does, and rows that fill up do nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.matrix import matrix

pytest.importorskip("triton")

from pdserve.engine.cuda.attention.triton_attention import TritonAttention
from pdserve.engine.cuda.capture.piece_sizes import MOST_PIECE_ROWS, piece_sizes
from pdserve.engine.cuda.capture.pieces import Buffers, Pieces
from pdserve.engine.cuda.copies.staging import Staging
from pdserve.engine.cuda.layers.forward import Forward, StepInputs
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.config import load_model_config
from pdserve.engine.request import Scheduled
from pdserve.engine.steps.batch import Batch
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import make_checkpoint
from tests.fakes.graphs import Recorded
from tests.fakes.late_copies import PromptCopies
from tests.plain_batch import build_batch
from tests.requests import make_request
from tests.unit.engine_cuda.decoders import random_weights
from tests.unit.engine_model.harness import make_prompt

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")
SIZES = (2, 4)
BLOCK_SIZE = 8
NUM_LAYERS = 2


@dataclass
class Model:
    """A model whose pieces are recorded over a pool of NaN."""

    forward: Forward
    pieces: Pieces
    buffers: Buffers
    pool: Tensor
    recorder: Recorded

    def run(self, batch: Batch, progress: LayerProgress | None = None) -> Tensor | None:
        """By pieces. What the buffers held before must not matter."""
        assert self.pieces.takes(batch)
        self.poison()
        there = Staging(PromptCopies()).upload(self.pieces.filled(batch))
        part = self.pieces.part(there, self.pool, TritonAttention(), progress)
        return self.forward.ends.results([part], len(batch.sampled_rows), batch.states, progress)

    def launch(self, batch: Batch, pool: Tensor) -> Tensor | None:
        """The same without pieces."""
        inputs = StepInputs(
            batch.token_ids, batch.positions, batch.attention, batch.sampled_rows, batch.states
        )
        return self.forward.logits(inputs, pool, TritonAttention().attend)

    def poison(self) -> None:
        stream = self.buffers.stream
        angles = [tensor for of_rope in stream.angles for tensor in of_rope]
        floats = [stream.residual, *angles, self.buffers.query]
        for tensor in [*floats, self.buffers.attended]:
            tensor.fill_(float("nan"))
        for tensor in (self.buffers.token_ids, self.buffers.positions, self.buffers.slots):
            tensor.fill_(10**9)


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path, interpreted: None) -> Model:
    """Of the family, and with the fields, that the test names as its parameter."""
    family, overrides = getattr(request, "param", ("llama", {}))
    sizes = {"num_hidden_layers": NUM_LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1}
    path = make_checkpoint(tmp_path, family, **sizes, **overrides)
    config = load_model_config(resolve_checkpoint(str(path)))
    forward = Forward(config, random_weights(config, torch.float32, CPU))
    pool = KvCache(config.kv_layout(BLOCK_SIZE, KvDtype.FLOAT32), 16, CPU).pool
    pool.fill_(float("nan"))
    buffers = Buffers.of(config, SIZES[-1], torch.float32, CPU)
    pieces, recorder = Pieces(forward, buffers, SIZES), Recorded()
    with torch.inference_mode():
        pieces.record(recorder, pool)
    return Model(forward, pieces, buffers, pool, recorder)


def batch_of(num_rows: Sequence[int], first_block: int = 0) -> Batch:
    """One prompt for each number of rows."""
    plan = []
    for number, count in enumerate(num_rows):
        request = make_request(make_prompt(count, seed=number))
        request.block_table = [first_block + number]
        plan.append(Scheduled(request, count))
    return build_batch(plan, BLOCK_SIZE, CPU)


def test_capturing_touches_no_block(model: Model) -> None:
    """All rows are filling ones then."""
    assert len(model.recorder.recordings) == len(SIZES) * (NUM_LAYERS + 1)
    assert model.pool.isnan().all()


FAMILIES = [
    ("qwen3", {}),  # norms of queries and keys
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {"sliding_window": 3}),
    ("qwen3_moe", {}),
]


@pytest.mark.parametrize(
    "model", matrix([(each,) for each in FAMILIES], 1), indirect=True, ids=lambda family: family[0]
)
@torch.inference_mode()
def test_a_step_is_what_its_launches_are(model: Model) -> None:
    """At both edges of each size: the logits, the KV, and what is left alone."""
    expected_pool = model.pool.clone()
    for first_block, num_rows in enumerate([(1,), (2,), (1, 2), (3, 1)]):
        batch = batch_of(num_rows, 2 * first_block)
        expected = model.launch(batch, expected_pool)
        found = model.run(batch)
        assert found is not None
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model.pool, expected_pool, atol=1e-4, rtol=1e-4, equal_nan=True)


@torch.inference_mode()
def test_a_step_is_one_launch_before_the_layers_and_one_for_each(model: Model) -> None:
    model.run(batch_of((1,)))
    replays = [recording.num_replays for recording in model.recorder.recordings]
    assert replays == [0] * (NUM_LAYERS + 1) + [1] * (NUM_LAYERS + 1), "the largest come first"


@torch.inference_mode()
def test_layers_are_reported_between_the_pieces(model: Model) -> None:
    """As soon as their KV is there, which is before that of the next one is."""
    written: list[list[bool]] = []

    def report(num_layers: int) -> None:
        is_there = ~model.pool[0, :, :, :, :3].isnan()  # what the prompt has of its block
        written.append([bool(layer.all()) for layer in is_there])

    model.run(batch_of((3,)), LayerProgress([1, 2], report))
    assert written == [[True, False], [True, True]]


@torch.inference_mode()
def test_a_step_that_samples_nothing_has_no_logits(model: Model) -> None:
    request = make_request(make_prompt(7))
    request.block_table = [0]
    assert model.run(build_batch([Scheduled(request, 3)], BLOCK_SIZE, CPU)) is None
    assert not model.pool[0, :, :, :, :3].isnan().any()
    assert model.pool[0, :, :, :, 3:].isnan().all()


def test_what_pieces_do_not_take(model: Model) -> None:
    assert model.pieces.takes(batch_of((4,)))
    assert not model.pieces.takes(batch_of((4, 1)))


def test_buffers_of_some_rows_are_the_first_of_all() -> None:
    config = load_model_config(resolve_checkpoint("pdserve/demo_model/checkpoint"))
    buffers = Buffers.of(config, 8, torch.float32, CPU)
    first = buffers.first(3)
    for field in fields(Buffers):
        whole, part = getattr(buffers, field.name), getattr(first, field.name)
        if isinstance(whole, Tensor):
            assert part.data_ptr() == whole.data_ptr()
            assert part.shape == (3, *whole.shape[1:])
            assert part.is_contiguous()


@pytest.mark.parametrize(
    ("most_tokens", "expected"),
    [
        (5, (5,)),
        (100, (16, 32, 64, 100)),
        (512, (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)),
        (8192, piece_sizes(MOST_PIECE_ROWS)),
    ],
)
def test_no_piece_is_larger_than_a_step(most_tokens: int, expected: tuple[int, ...]) -> None:
    assert piece_sizes(most_tokens) == expected


def test_large_steps_are_filled_up_by_at_most_a_fifth() -> None:
    sizes = piece_sizes(MOST_PIECE_ROWS)
    assert list(sizes) == sorted(set(sizes))
    assert all(4 * (b - a) <= a for a, b in pairwise(sizes) if a >= 256)
