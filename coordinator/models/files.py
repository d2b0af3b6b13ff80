"""The small files of a model, without its weights: what a coordinator reads of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from coordinator.models.embedding import EmbeddingModel, embedding_model
from coordinator.models.scoring import ScoringModel, check_scoring, scoring_model
from coordinator.models.text_files import TextFiles
from coordinator.text import Tokenizer
from pdserve.demo_model import CHECKPOINT_PATH, DEMO_MODEL_NAME
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.model_files.sampling_defaults import SamplingDefaults, sampling_defaults
from pdserve.settings.answers import AnswerConfig
from pdserve.settings.config import CheckpointConfig, CoordinatorConfig
from pdserve.settings.models import RegisteredModel, check_alone, read_models
from pdserve.settings.prices import Price
from pdserve.shared.errors import PdserveError


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What they tell."""

    model_id: str  # the checkpoint's; every node has to serve the same
    name: str  # what clients call it
    text: TextFiles
    embedding: EmbeddingModel
    scoring: Callable[[Tokenizer], ScoringModel]  # raises ModelError
    sampling: SamplingDefaults
    max_model_len: int | None = None  # until a node of a model that may sleep says its own
    registered: RegisteredModel | None = None  # what the file of models says; None: there is none

    @property
    def names(self) -> list[str]:
        """All that clients call it, its own first."""
        return [self.name, *(self.registered.aliases if self.registered else ())]

    @property
    def price(self) -> Price | None:
        """What its tokens cost; None: nothing is said."""
        return self.registered.price if self.registered else None

    @property
    def tenants(self) -> frozenset[str]:
        """Who may use it; empty: everybody."""
        return frozenset(self.registered.tenants if self.registered else ())


def read_all_model_files(config: CoordinatorConfig) -> list[ModelFiles]:
    """Read those of each model that the coordinator is to serve. Raises as `read_model_files`."""
    if not config.models:
        return [replace(read_model_files(config.checkpoint, config.answers), max_model_len=None)]
    check_alone(config.models, config.checkpoint)
    found = []
    for name, model in read_models(config.models).models.items():
        checkpoint = CheckpointConfig(
            model=model.source, revision=model.revision, served_model_name=name
        )
        try:
            files = read_model_files(checkpoint, config.answers, model.chat_template)
        except PdserveError as error:
            raise type(error)(f"{config.models}: models.{name}: {error.message}") from error
        most = [n for n in (files.max_model_len, model.max_model_len) if n]
        found.append(replace(files, registered=model, max_model_len=min(most, default=None)))
    return found


def read_model_files(
    config: CheckpointConfig, answers: AnswerConfig, chat_template: str = ""
) -> ModelFiles:
    """Read the checkpoint's small files; a model of the hub is downloaded without its weights.

    The tokenizer's are looked at, and loaded later. `chat_template`: a file that replaces the
    checkpoint's own; empty: none does.

    Raises:
        PdserveError: the checkpoint cannot be served; says why.
    """
    checkpoint = resolve_checkpoint(
        config.model or str(CHECKPOINT_PATH), config.revision, with_weights=False
    )
    values = checkpoint.config()
    vocab_size, most = values.get("vocab_size"), values.get("max_position_embeddings")
    num_ids = vocab_size if isinstance(vocab_size, int) else None  # nodes say what is wrong
    text = TextFiles.of(checkpoint.path, num_ids, chat_template)
    embedding = embedding_model(checkpoint, answers.pooling)
    check_scoring(embedding, answers.scoring)
    own_name = checkpoint.model_id if config.model else DEMO_MODEL_NAME
    return ModelFiles(
        model_id=checkpoint.model_id,
        name=config.served_model_name or own_name,
        text=text,
        embedding=embedding,
        sampling=sampling_defaults(checkpoint),
        max_model_len=most if isinstance(most, int) else None,
        scoring=lambda tokenizer: scoring_model(checkpoint, tokenizer, embedding, answers.scoring),
    )
