"""How a model scores a document for a query, according to its files or its operator.

A reranker of Qwen3-Reranker's kind is a causal model that is asked whether the document meets the
query, and the score is the probability of "yes" among "yes" and "no". An embedding model's score is
the cosine of two embeddings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from coordinator.models.embedding import EmbeddingModel
from coordinator.models.modules import Modules
from coordinator.text import Tokenizer
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.protocol import TokenLogprobs
from pdserve.settings.answers import ScoringName
from pdserve.shared.errors import InvalidRequest, ModelError

_TASK: Final = "Judge whether the Document meets the requirements"
BEFORE: Final = (
    f"<|im_start|>system\n{_TASK} based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_LARGEST_EXPONENT: Final = 700.0  # of a float; the score is 0 long before
_NEITHER: Final = (
    "this model's files say neither that it is a reranker (a LogitScore module) nor that it makes "
    "embeddings (a Pooling module). Of a checkpoint that answers yes or no to the prompt of "
    "Qwen3-Reranker, the operator says so with --set answers.scoring=yes-no; cosine compares "
    "embeddings"
)


@dataclass(frozen=True, slots=True)
class YesNo:
    """A causal model's verdict on a pair, in the prompt format of Qwen3-Reranker."""

    yes: int  # token ids
    no: int

    def pair(self, instruction: str | None, query: str, document: str) -> str:
        """Return the text between `BEFORE` and `AFTER`."""
        asked = _INSTRUCTION if instruction is None else instruction
        return f"<Instruct>: {asked}\n<Query>: {query}\n<Document>: {document}"

    def score(self, first: TokenLogprobs) -> float:
        """Return the probability of yes among yes and no, from those of the first token."""
        found = dict(zip(first.top_ids, first.top_logprobs, strict=True))
        return 1.0 / (1.0 + math.exp(min(found[self.no] - found[self.yes], _LARGEST_EXPONENT)))


@dataclass(frozen=True, slots=True)
class ScoringModel:
    """How a model scores."""

    judge: YesNo | None = None  # None: by the cosine of embeddings
    refusal: str = ""  # why it scores nothing; empty: it does

    def check(self) -> None:
        """Raise InvalidRequest if this model scores nothing; says why."""
        if self.refusal:
            raise InvalidRequest(self.refusal, "model")


NO_SCORES: Final = ScoringModel(refusal=_NEITHER)


def check_scoring(embedding: EmbeddingModel, name: ScoringName) -> None:
    """Raise ModelError: the model cannot score as the operator says, whatever its tokenizer."""
    if name == "cosine" and embedding.refusal:
        raise ModelError(f"answers.scoring is cosine, but {embedding.refusal}")


def scoring_model(
    checkpoint: Checkpoint, tokenizer: Tokenizer, embedding: EmbeddingModel, name: ScoringName
) -> ScoringModel:
    """Read how a checkpoint scores; `name` is the operator's choice.

    Raises:
        ModelError: a file is invalid, or the model cannot score as the operator says.
    """
    check_scoring(embedding, name)
    if name == "yes-no":
        return ScoringModel(_named(tokenizer))
    if name == "cosine":
        return ScoringModel()
    modules = Modules.of(checkpoint)
    if "LogitScore" in modules.kinds:
        return _of_logits(modules, tokenizer)
    if embedding.is_declared:
        return ScoringModel(refusal=embedding.refusal)
    return NO_SCORES


def _named(tokenizer: Tokenizer) -> YesNo:
    yes, no = tokenizer.token_id("yes"), tokenizer.token_id("no")
    if yes is None or no is None:
        raise ModelError(
            "answers.scoring is yes-no, but this model's tokenizer has no single tokens for 'yes' "
            "and 'no'; it is no reranker of this kind"
        )
    return YesNo(yes, no)


def _of_logits(modules: Modules, tokenizer: Tokenizer) -> ScoringModel:
    """Read a LogitScore module: two tokens whose logits are compared."""
    config = modules.config("LogitScore")
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    template = tokenizer.chat_template
    if no is None or template is None or _TASK not in template.source:
        return ScoringModel(
            refusal="this reranker has a prompt, or a score, of its own; served is that of "
            "Qwen3-Reranker, whose chat template asks for yes or no, and which has ids of both"
        )
    return ScoringModel(YesNo(_checked(yes, tokenizer), _checked(no, tokenizer)))


def _checked(token_id: Any, tokenizer: Tokenizer) -> int:
    """Return a module's token id. Raises ModelError."""
    if type(token_id) is int and 0 <= token_id < tokenizer.num_ids:
        return token_id
    raise ModelError(f"LogitScore's token ids must be ids of the model, not {token_id!r}")
