"""`pdserve models` changes what is asked for in the file, and nothing else."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pdserve.commands.cli.models import added, removed, run
from pdserve.node.start.model import plan_model
from pdserve.settings.config import NodeConfig, WeightsConfig
from pdserve.settings.models import node_of_model, read_models
from pdserve.shared.errors import ConfigError
from tests.checkpoints import make_checkpoint

TEXT = """\
# ours
shared = { decode = 1 }

[models.small]  # the one
source = "small"
aliases = ["mini"]

[models."org/big"]
source = "org/big"  # on the hub
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "small", "llama")
    path = tmp_path / "models.toml"
    path.write_text(TEXT)
    return path


def test_models_are_listed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(file), "list", []) == 0
    head, small, big = capsys.readouterr().out.splitlines()
    assert head.split() == ["model", "source", "pinned", "to", "own", "nodes", "aliases"]
    assert small.split()[0] == "small"
    assert small.endswith("1+1        mini")
    assert big.split()[:2] == ["org/big", "org/big"]


def test_models_come_and_go_and_the_rest_stays(file: Path) -> None:
    run(str(file), "add", ["new", "small", 'dtype="bfloat16"', "min={decode=2}"])
    text = file.read_text()
    assert text.startswith(TEXT)
    new = read_models(str(file)).models["new"]
    assert (new.dtype, new.min.prefill, new.min.decode) == ("bfloat16", 0, 2)
    run(str(file), "remove", ["new"])
    run(str(file), "remove", ["org/big"])
    text = file.read_text()
    assert text == TEXT[: TEXT.index('[models."org/big"]')]
    assert tomllib.loads(text)["shared"] == {"decode": 1}


def test_a_first_model(tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    run(str(path), "add", ["org/big", "org/big"])
    assert path.read_text() == '[models."org/big"]\nsource = "org/big"\n'


def test_a_pinned_model_is_refused_once_its_files_change(file: Path) -> None:
    run(str(file), "pin", ["mini"])
    small = read_models(str(file)).models["small"]
    assert "[models.small]  # the one\ndigest = " in file.read_text()

    config = NodeConfig(models=str(file), checkpoint=WeightsConfig(model="small"))

    def revision() -> str:
        return plan_model(node_of_model(config).config).checkpoint.revision

    node_of_model(config).check_digest(revision())
    assert revision() == small.digest
    make_checkpoint(file.parent / "small", "llama", seed=9)
    with pytest.raises(ConfigError, match=r"models.small is pinned .* but its files are"):
        node_of_model(config).check_digest(revision())
    run(str(file), "unpin", ["small"])
    assert file.read_text() == TEXT
    node_of_model(config).check_digest(revision())


@pytest.mark.parametrize(
    ("action", "words", "says"),
    [
        ("add", ["small", "x"], "there is a model 'small' already"),
        ("add", ["mini", "x"], "'mini' is a name of models.small, too"),
        ("add", ["x"], "give a name, a source"),
        ("add", ["x", "y", "colour=1"], "unknown field `colour`"),
        ("add", ["x", "y", "dtype"], "write KEY=VALUE"),
        ("add", ["x", "y", "dtype=float32"], "cannot read"),
        ("remove", ["smal"], "no model 'smal'; did you mean `small`"),
        ("remove", [], "give the name of one model"),
        ("pin", ["a", "b"], "give the name of one model"),
    ],
)
def test_what_would_be_wrong_is_not_written(
    action: str, words: list[str], says: str, file: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        run(str(file), action, words)
    assert file.read_text() == TEXT


def test_a_model_without_a_table_of_its_own_is_left_to_people(tmp_path: Path) -> None:
    text = 'models = { a = { source = "x" } }\n'
    with pytest.raises(ConfigError, match=r"has no line \[models.a\]"):
        removed(text, tmp_path / "f.toml", ["a"])
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        added("", tmp_path / "f.toml", ["a", "x", "y"])
