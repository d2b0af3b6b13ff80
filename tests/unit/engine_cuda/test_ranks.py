"""CudaDecoder on several ranks: the tokens of one, and its graphs have the ranks' sums in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.parameters import DecoderWeights
from pdserve.engine.ranks.collectives import Collectives
from pdserve.engine.request import Scheduled
from tests.checkpoints import make_checkpoint
from tests.fakes.graphs import Recorded
from tests.fakes.late_copies import PromptCopies
from tests.requests import make_request
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt
from tests.unit.engine_model.threaded_ranks import threaded_node

pytestmark = pytest.mark.usefixtures("interpreted")

NUM_LAYERS = 2
BUCKETS = (1, 4)
SUMS = ["all_reduce"] * (1 + 2 * NUM_LAYERS)  # embeddings; attention and MLP
STEP = [*SUMS, "gather"]
GRAPH = ["broadcast", *STEP]  # the tokens come first


def checkpoint(path: Path, family: str, **overrides: int) -> Path:
    sizes = {"num_hidden_layers": NUM_LAYERS, "max_position_embeddings": 64}
    return make_checkpoint(path, family, **(sizes | overrides))


def cuda_decoders(
    recorders: list[Recorded] | None,
    buckets: tuple[int, ...] = BUCKETS,
    pieces: tuple[int, ...] = (),
    least_part: int = 256,
    tap_layers: tuple[int, ...] = (),
) -> Callable[..., Decoder]:
    """What makes a rank's decoder, with a recorder of its own; or without graphs."""

    def make(config: ModelConfig, weights: DecoderWeights, ranks: Collectives) -> Decoder:
        from pdserve.engine.cuda.attention.triton_attention import TritonAttention
        from pdserve.engine.cuda.copies.staging import Staging
        from pdserve.engine.cuda.decoder import CudaDecoder

        recorder = None if recorders is None else Recorded()
        if recorder is not None and recorders is not None:
            recorders.append(recorder)
        return CudaDecoder(
            config,
            weights,
            TritonAttention(),
            Staging(PromptCopies()),
            recorder,
            buckets,
            TritonAttention(),
            ranks,
            pieces,
            least_part=least_part,
            tap_layers=tap_layers if ranks.shard.num_stages > 1 or ranks.shard.rank == 0 else (),
        )

    return make


@pytest.mark.parametrize(
    ("family", "num_ranks", "num_stages", "overrides"),
    [
        pytest.param(
            "llama", 2, 1, {"vocab_size": 319, "intermediate_size": 99}, marks=pytest.mark.long
        ),
        pytest.param("qwen3", 4, 1, {}, marks=pytest.mark.long),  # 2 KV heads, each on two ranks
        ("llama", 2, 2, {"vocab_size": 319}),
        pytest.param("qwen3", 1, 2, {"num_hidden_layers": 3}, marks=pytest.mark.long),
        pytest.param("olmo2", 2, 1, {}, marks=pytest.mark.long),
        pytest.param("deepseek_v3", 2, 1, {}, marks=pytest.mark.long),
        pytest.param("gpt_oss", 2, 1, {}, marks=pytest.mark.long),
        pytest.param("gpt_oss", 1, 2, {}, marks=pytest.mark.long),
    ],
)
def test_tokens_are_those_of_one_rank(
    tmp_path: Path, family: str, num_ranks: int, num_stages: int, overrides: dict[str, int]
) -> None:
    """Steps of 5 rows and of 3 are computed by pieces, and by several stages in parts."""
    path = checkpoint(tmp_path, family, **({"num_hidden_layers": num_stages} | overrides))
    expected, found = (
        [make_request(make_prompt(n, seed=n), request_id=str(n)) for n in (1, 6)] for _ in range(2)
    )
    Node.load(path, DecoderKind.TORCH).generate(expected, 2)
    recorders: list[Recorded] = []
    pieces = (4, 8) if num_stages == 1 else (2, 4)
    make = cuda_decoders(recorders, (2,), pieces, least_part=2)
    with threaded_node(path, num_ranks, make, num_stages=num_stages, num_blocks=40) as (node, _):
        node.generate(found, 2, chunk=4)
    assert [r.output_token_ids for r in found] == [r.output_token_ids for r in expected]
    replays = [[recording.num_replays for recording in r.recordings] for r in recorders]
    used = [all(each) for each in replays]
    assert used == [True] * num_ranks * num_stages, "one of decodes, and the pieces of both sizes"
    for stage in range(num_stages):
        own = replays[stage * num_ranks : (stage + 1) * num_ranks]
        assert own == [own[0]] * num_ranks, "all ranks replay the same graphs"


@pytest.mark.long
def test_stages_launch_parts_too(tmp_path: Path) -> None:
    """Without graphs; with a window, and uneven stages."""
    path = checkpoint(tmp_path, "mistral", num_hidden_layers=3, sliding_window=3)
    expected, found = (
        [make_request(make_prompt(n, seed=n), request_id=str(n)) for n in (1, 6)] for _ in range(2)
    )
    Node.load(path, DecoderKind.TORCH).generate(expected, 2)
    make = cuda_decoders(None, least_part=2)
    with threaded_node(path, 1, make, num_stages=2, num_blocks=40) as (node, ranks):
        node.generate(found, 2)
        assert ranks[0].calls.count("send") == 3 + 1, "of a step with 7 rows, and of one with 2"
    assert [r.output_token_ids for r in found] == [r.output_token_ids for r in expected]


@pytest.mark.long
def test_a_replay_and_a_launched_step_have_two_sums_a_layer(tmp_path: Path) -> None:
    recorders: list[Recorded] = []
    path = checkpoint(tmp_path, "llama")
    with threaded_node(path, 2, cuda_decoders(recorders), num_blocks=40) as (node, ranks):
        request = make_request(make_prompt(6))
        node.step([Scheduled(request, 6)])  # captures the graphs, and is launched
        capture_and_step = [*GRAPH, "largest"] * len(BUCKETS) + STEP
        assert [rank.calls for rank in ranks] == [capture_and_step] * 2
        for rank in ranks:
            rank.calls.clear()
        node.step([Scheduled(request, 1)])
        assert [rank.calls for rank in ranks] == [GRAPH] * 2
    assert [r.recordings[0].num_replays for r in recorders] == [1, 1]


@pytest.mark.long
def test_pieces_have_these_sums_in_them(tmp_path: Path) -> None:
    recorders: list[Recorded] = []
    path = checkpoint(tmp_path, "llama")
    make = cuda_decoders(recorders, pieces=(8,))
    with threaded_node(path, 2, make, num_blocks=40) as (node, ranks):
        request = make_request(make_prompt(6))
        node.step([Scheduled(request, 6)])
        assert [rank.calls for rank in ranks] == [
            [*GRAPH, "largest"] * len(BUCKETS) + SUMS + STEP
        ] * 2


@pytest.mark.long
def test_layers_are_reported_when_all_ranks_have_written_them(tmp_path: Path) -> None:
    """Which is known behind the sums that follow: all have come to these."""
    recorders: list[Recorded] = []
    path = checkpoint(tmp_path, "llama")
    make = cuda_decoders(recorders, pieces=(8,))
    with threaded_node(path, 2, make, num_blocks=40) as (node, ranks):
        request = make_request(make_prompt(6))
        node.step([Scheduled(request, 3)])  # captures the graphs
        ranks[0].calls.clear()
        seen: list[tuple[int, int]] = []
        progress = LayerProgress([1, 2], lambda layer: seen.append((layer, len(ranks[0].calls))))
        node.runner.execute([Scheduled(request, 3)], progress)
    assert seen == [(1, 3), (2, 5)]


def test_ranks_capture_as_many_graphs_as_have_room_on_each(tmp_path: Path) -> None:
    """One rank's graphs take more memory than the others'."""
    recorders: list[Recorded] = []
    path = checkpoint(tmp_path, "llama", num_hidden_layers=1)
    with threaded_node(path, 2, cuda_decoders(recorders), num_blocks=40) as (node, _):
        recorders[1].num_bytes = 4 << 30
        node.step([Scheduled(make_request(make_prompt(6)), 6)])
    assert [len(recorder.recordings) for recorder in recorders] == [1, 1]


def test_a_rank_that_cannot_capture_gives_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What one rank launches is no match for what the others replay."""
    recorders: list[Recorded] = []
    path = checkpoint(tmp_path, "llama")
    with threaded_node(path, 2, cuda_decoders(recorders), num_blocks=40) as (node, _):
        for recorder in recorders:
            recorder.refusal = "operation not permitted when stream is capturing"
        with pytest.raises(RuntimeError, match="not permitted"):
            node.step([Scheduled(make_request(make_prompt(6)), 6)])
    assert "cuda_graphs = false" in caplog.text
