"""A model's shape by the name of a checkpoint, or of a shape that none need have."""

from __future__ import annotations

from pdserve.commands.bench.checkpoints.random_checkpoint import config_of
from pdserve.commands.bench.checkpoints.shapes import SHAPES
from pdserve.engine.models.config import ModelConfig, load_model_config, parse_model_config
from pdserve.engine.models.json_fields import JsonFields
from pdserve.model_files.checkpoint import resolve_checkpoint


def model_named(name: str) -> ModelConfig:
    """Return a model's shape: `name` is one of SHAPES, a directory, or a hub id.

    Raises ModelError.
    """
    if (shape := SHAPES.get(name)) is not None:
        return parse_model_config(JsonFields(config_of(shape), name))
    return load_model_config(resolve_checkpoint(name, with_weights=False))
