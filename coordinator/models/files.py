"""The small files of a model, without its weights: what a coordinator reads of a checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from coordinator.models.embedding import EmbeddingModel, embedding_model
from coordinator.models.scoring import ScoringModel, scoring_model
from coordinator.text import Tokenizer
from pdserve.demo_model import CHECKPOINT_PATH, DEMO_MODEL_NAME
from pdserve.model_files.checkpoint import Checkpoint, resolve_checkpoint
from pdserve.settings.answers import AnswerConfig
from pdserve.settings.config import CheckpointConfig
from pdserve.shared.errors import TokenizerError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What they tell."""

    model_id: str  # the checkpoint's; every node has to serve the same
    name: str  # what clients call it
    tokenizer: Tokenizer
    embedding: EmbeddingModel
    scoring: ScoringModel


def read_model_files(config: CheckpointConfig, answers: AnswerConfig) -> ModelFiles:
    """Read the checkpoint's small files; a model of the hub is downloaded without its weights.

    Raises:
        PdserveError: the checkpoint cannot be served; says why.
    """
    checkpoint = resolve_checkpoint(
        config.model or str(CHECKPOINT_PATH), config.revision, with_weights=False
    )
    vocab_size = checkpoint.config().get("vocab_size")
    num_ids = vocab_size if isinstance(vocab_size, int) else None  # nodes say what is wrong
    tokenizer = Tokenizer.from_checkpoint(checkpoint.path, num_ids)
    _check_vocabulary(tokenizer, checkpoint)
    embedding = embedding_model(checkpoint, answers.pooling)
    own_name = checkpoint.model_id if config.model else DEMO_MODEL_NAME
    return ModelFiles(
        model_id=checkpoint.model_id,
        name=config.served_model_name or own_name,
        tokenizer=tokenizer,
        embedding=embedding,
        scoring=scoring_model(checkpoint, tokenizer, embedding, answers.scoring),
    )


def _check_vocabulary(tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    """Raise TokenizerError if text can become tokens that the model does not have.

    Special tokens are only warned of: many models have one, for padding, that is never used.
    """
    num_ids = tokenizer.num_ids
    beyond = tokenizer.tokens_from(num_ids)
    text = [token_id for token_id in beyond if not tokenizer.is_special(token_id)]
    first = next(iter(text or beyond), None)
    if first is None:
        return
    said = (
        f"{checkpoint.path}: its tokenizer has tokens, such as {beyond[first]} ({first}), that the "
        f"model with its {num_ids} ids (vocab_size) lacks"
    )
    if text:
        raise TokenizerError(f"{said}; use the tokenizer that it was trained with")
    log.warning("%s; prompts with these special tokens will be refused", said)
