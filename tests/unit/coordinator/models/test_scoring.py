"""What a checkpoint's files say about scoring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from coordinator.models.embedding import EmbeddingModel, embedding_model
from coordinator.models.scoring import NO_SCORES, ScoringModel, YesNo, scoring_model
from coordinator.text import ChatTemplate, Tokenizer
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.protocol import TokenLogprobs
from pdserve.shared.errors import InvalidRequest, ModelError
from tests.unit.coordinator.text import made_tokenizers as made

TEMPLATE = "Judge whether the Document meets the requirements {{ messages }}"
TRANSFORMER = {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
LOGIT_SCORE = {
    "path": "1_LogitScore",
    "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
}


def tokenizer(template: str = TEMPLATE, *, has_words: bool = True) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(made.byte_level_json())
    if has_words:
        backend.add_tokens(["yes", "no"])
    return Tokenizer(backend, chat_template=ChatTemplate(template, {}))


def checkpoint(folder: Path, module: Any = None, config: Any = None) -> Checkpoint:
    (folder / "config.json").write_text("{}")
    if module is not None:
        (folder / "modules.json").write_text(json.dumps([TRANSFORMER, module]))
        (folder / module["path"]).mkdir()
        (folder / module["path"] / "config.json").write_text(json.dumps(config))
    return Checkpoint(path=folder, model_id="m", revision="r")


def test_the_operator_says_that_a_causal_model_is_a_reranker(tmp_path: Path) -> None:
    plain, words = checkpoint(tmp_path), tokenizer()
    assert scoring_model(plain, words, EmbeddingModel(), "auto") is NO_SCORES
    judge = scoring_model(plain, words, EmbeddingModel(), "yes-no").judge
    assert judge == YesNo(words.token_id("yes") or 0, words.token_id("no") or 0)
    with pytest.raises(ModelError, match="no single tokens for 'yes'"):
        scoring_model(plain, tokenizer(has_words=False), EmbeddingModel(), "yes-no")


def test_a_logit_score_module_has_the_ids(tmp_path: Path) -> None:
    files = checkpoint(tmp_path, LOGIT_SCORE, {"true_token_id": 7, "false_token_id": 9})
    assert scoring_model(files, tokenizer(), EmbeddingModel(), "auto") == ScoringModel(YesNo(7, 9))
    other = scoring_model(files, tokenizer("{{ messages }}"), EmbeddingModel(), "auto")
    with pytest.raises(InvalidRequest, match="a prompt, or a score, of its own"):
        other.check()


@pytest.mark.parametrize("config", [{"true_token_id": 7, "false_token_id": None}, {}])
def test_a_score_that_is_one_logit_is_refused_when_asked_for(tmp_path: Path, config: Any) -> None:
    model = scoring_model(
        checkpoint(tmp_path, LOGIT_SCORE, config), tokenizer(), EmbeddingModel(), "auto"
    )
    with pytest.raises(InvalidRequest, match="has ids of both"):
        model.check()


def test_ids_that_the_model_lacks_are_told_at_the_start(tmp_path: Path) -> None:
    files = checkpoint(tmp_path, LOGIT_SCORE, {"true_token_id": 7, "false_token_id": 10**6})
    with pytest.raises(ModelError, match="not 1000000"):
        scoring_model(files, tokenizer(), EmbeddingModel(), "auto")


def test_an_embedding_model_compares(tmp_path: Path) -> None:
    files = checkpoint(tmp_path, POOLING, {"pooling_mode_mean_tokens": True})
    found = scoring_model(files, tokenizer(), embedding_model(files), "auto")
    assert found == ScoringModel()
    by_flag = embedding_model(checkpoint(tmp_path), "mean")
    assert scoring_model(checkpoint(tmp_path), tokenizer(), by_flag, "auto") == ScoringModel()
    refused = EmbeddingModel(refusal="this model pools by max", is_declared=True)
    with pytest.raises(ModelError, match="pools by max"):
        scoring_model(files, tokenizer(), refused, "cosine")
    with pytest.raises(InvalidRequest, match="pools by max"):
        scoring_model(files, tokenizer(), refused, "auto").check()


@pytest.mark.parametrize(
    ("yes", "no", "score"), [(-1.0, -1.0, 0.5), (0.0, -2000.0, 1.0), (-2000.0, 0.0, 0.0)]
)
def test_a_score_is_the_share_of_yes(yes: float, no: float, score: float) -> None:
    found = YesNo(7, 9).score(TokenLogprobs(chosen=0.0, top_ids=[9, 7], top_logprobs=[no, yes]))
    assert found == pytest.approx(score)
