"""A tokenizer and a model that do not belong together are told as it is loaded."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import coordinator.text
from coordinator.models.files import read_model_files
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.settings.answers import AnswerConfig
from pdserve.settings.config import CheckpointConfig
from pdserve.shared.errors import InvalidRequest, TokenizerError
from tests.checkpoints import edit_config

NUM_IDS = 2048  # of the demo model, all of them used


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT_PATH / name, tmp_path)
    return tmp_path


def load(folder: Path) -> coordinator.text.Tokenizer:
    return read_model_files(CheckpointConfig(model=str(folder)), AnswerConfig()).text.load()


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    edit_config(folder, vocab_size=NUM_IDS - 1)
    with pytest.raises(TokenizerError, match=rf"such as .* \({NUM_IDS - 1}\).* {NUM_IDS - 1} ids"):
        load(folder)


def test_special_tokens_that_the_model_lacks_are_only_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Many fine-tunes have a token for padding that is never used."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    load(folder)
    (said,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert f"[PAD] ({NUM_IDS})" in said


def test_a_model_larger_than_its_tokenizer_is_usual(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(folder, vocab_size=NUM_IDS + 100)
    tokenizer = load(folder)
    assert not caplog.records
    tokenizer.check_ids([0, NUM_IDS + 99], "p")
    with pytest.raises(InvalidRequest, match=f"from 0 to {NUM_IDS + 99}"):
        tokenizer.check_ids([NUM_IDS + 100], "p")
