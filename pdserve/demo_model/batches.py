"""From documents to batches: token ids in packed rows, each with the weight of its loss."""

from collections.abc import Iterator
from typing import Final

import torch
from tokenizers import Tokenizer

from pdserve.demo_model.corpus import Conversation, Document
from pdserve.demo_model.tokenizer import BOS, END, END_OF_TEXT, ROLE_TOKENS, token_id

PROMPT_WEIGHT: Final = 0.05
"""The model has to answer questions, not to invent them; a little keeps the embeddings honest."""
PROSE_WEIGHT: Final = 0.5
"""Stories are long and partly a matter of taste; an answer of three tokens must not drown."""
PROSE_LENGTH: Final = 48

Weighted = list[tuple[int, float]]


def encode_document(tokenizer: Tokenizer, document: Document) -> Weighted:
    """Return (token id, loss weight) pairs, the ids exactly as the chat template gives them."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    tokens: Weighted = [(token_id(tokenizer, BOS), 0.0)]
    if not isinstance(document, Conversation):
        ids = [*encode(document.text), token_id(tokenizer, END_OF_TEXT)]
        return tokens + [(token, PROSE_WEIGHT) for token in ids]
    for message in document.messages:
        ids = [*encode(message.text), token_id(tokenizer, END)]
        weight = PROMPT_WEIGHT
        if message.role == "assistant":
            weight = 1.0 if len(ids) < PROSE_LENGTH else PROSE_WEIGHT
        tokens.append((token_id(tokenizer, ROLE_TOKENS[message.role]), 0.0))
        tokens.extend((token, weight) for token in ids)
    return tokens


class PackedRows:
    """Cuts an endless stream of documents into rows without padding.

    A row may begin in the middle of a document and hold several. The model thereby learns that
    what stood before <|bos|> does not matter, and sees every position of a long context.
    """

    def __init__(self, tokenizer: Tokenizer, documents: Iterator[Document]) -> None:
        self._tokenizer = tokenizer
        self._documents = documents
        self._pending: Weighted = []

    def take(self, num_rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and weights, both [num_rows, length + 1]."""
        wanted = num_rows * (length + 1)
        while len(self._pending) < wanted:
            self._pending.extend(encode_document(self._tokenizer, next(self._documents)))
        taken, self._pending = self._pending[:wanted], self._pending[wanted:]
        ids = torch.tensor([token for token, _ in taken]).view(num_rows, length + 1)
        weights = torch.tensor([weight for _, weight in taken]).view(num_rows, length + 1)
        return ids, weights
