"""`pdserve kv` against numbers computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.commands.cli.main import main
from pdserve.shared.process.exit_codes import OK
from tests.heads import make_eagle3
from tests.matrix import matrix


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["kv", *words]) == OK
    return capsys.readouterr().out


def test_70b_on_four_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """70.55e9 weights of 2 bytes; a token has 80 layers x 2 x 8 heads x 128 x 2 bytes."""
    told = shown(capsys, "--model=70b", "--devices=4")
    assert "weights          35.28 GB of each device" in told
    assert f"{80 * 2 * 8 * 128 * 2 // 4} bytes a token of each device" in told
    # 0.9 x 80 GB - 35.28 - 3.97 of the step = 32.75 GB, / 81,920 bytes = 399,808 tokens.
    assert "399808 tokens" in told
    assert f"requests of 8192 tokens: {399808 // 8192}" in told
    assert told.endswith(f"as without blocks: {399808 // 131072}\n")


def test_heads_beyond_their_number_are_replicated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "40960 bytes a token" in shown(capsys, "--model=70b", "--devices=8")
    assert "40960 bytes a token" in shown(capsys, "--model=70b", "--devices=16")


def test_stages_have_some_of_the_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """The largest ones count: 27 of 80 layers of 855.7e6 weights, and 1050.7e6 of the output."""
    told = shown(capsys, "--model=70b", "--devices=3", "--pipeline-parallel=3")
    assert f"weights          {2 * (27 * 0.8557 + 1.0507):.2f} GB of each device" in told
    assert f"{27 * 2 * 8 * 128 * 2} bytes a token of each device" in told


def test_shorter_limits_let_preallocation_keep_up(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, "--model=8b", "--context=1000", "--max-model-len=1000", "--block-size=1")
    paged, preallocated = (int(line.split(":")[1]) for line in told.splitlines()[-2:])
    assert paged == preallocated > 100


@pytest.mark.parametrize(
    ("words", "says"),
    matrix(
        [
            (("--model=70b",), "no GPU memory is left for KV"),
            (("--model=8b", "--devices=3"), "can be divided among 1, 2, 4, 8, 16, 32 ranks"),
            (("--model=8b", "--devices=3", "--pipeline-parallel=2"), "among 2 stages"),
            (("--model=8b", "--devices=40", "--pipeline-parallel=40"), "the model has 32 layers"),
            (("--model=9b",), "9b"),
            (("--model=8b", "--max-model-len=999999"), "is more than the model's own 131072"),
            (("--device-memory=much",), "is not a size"),
        ],
        2,
    ),
)
def test_what_does_not_fit_is_said(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert main(["kv", *words]) != OK
    assert says in capsys.readouterr().err


def test_codes_take_half_and_are_recommended_from_the_context(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An 8b token has 32 layers x 2 x 8 heads of 128 bytes, and scales of 4."""
    plain, coded = (shown(capsys, "--model=8b", f"--kv-dtype={f}") for f in ("auto", "int8"))
    assert f"{32 * 2 * 8 * 256} bytes a token" in plain
    assert f"{32 * 2 * 8 * 132} bytes a token" in coded
    assert "with --kv-dtype int8 decode steps" in plain
    assert "kept as int8" in coded
    assert "leave it as it is" in shown(capsys, "--model=8b", "--context=64", "--max-batch-size=1")


def test_drafts_have_a_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Heads have an eighth: a token of this one has 2 x 2 heads of 16 numbers of 4 bytes."""
    head = make_eagle3(tmp_path / "head")
    plain, told = (shown(capsys, "--model=8b", *more) for more in ((), (f"--draft={head}",)))
    num_bytes = json.loads(shown(capsys, "--model=8b", "--json"))["kv_bytes"]
    own = num_bytes // 8
    line = f"{own / 1e9:.2f} GB of it for {own // 256} tokens of drafts, and so "
    assert line + f"{(num_bytes - own) // (32 * 2 * 8 * 256)} of the model" in told
    assert "drafts" not in plain
    assert main(["kv", "--model=8b", "--draft=mtp"]) != OK
    assert "no layer that predicts further tokens" in capsys.readouterr().err
