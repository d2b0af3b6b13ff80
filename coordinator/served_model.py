"""The model that a coordinator serves: its names and its small files, without the weights."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.embedding_model import EmbeddingModel, embedding_model
from coordinator.text import Tokenizer
from pdserve.checkpoint import resolve_checkpoint
from pdserve.config import CheckpointConfig, PoolingName
from pdserve.demo_model import CHECKPOINT_PATH, DEMO_MODEL_NAME


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a coordinator has to know of the model."""

    model_id: str  # the checkpoint's; every node has to serve the same
    name: str  # what clients call it
    tokenizer: Tokenizer
    embedding: EmbeddingModel


def load_served_model(config: CheckpointConfig, pooling: PoolingName) -> ServedModel:
    """Read the checkpoint's small files; a model of the hub is downloaded without its weights.

    Raises:
        PdserveError: the checkpoint cannot be served; says why.
    """
    checkpoint = resolve_checkpoint(
        config.model or str(CHECKPOINT_PATH), config.revision, with_weights=False
    )
    own_name = checkpoint.model_id if config.model else DEMO_MODEL_NAME
    return ServedModel(
        model_id=checkpoint.model_id,
        name=config.served_model_name or own_name,
        tokenizer=Tokenizer.from_checkpoint(checkpoint.path),
        embedding=embedding_model(checkpoint, pooling),
    )
