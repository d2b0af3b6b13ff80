"""Converts documents to batches: token ids in packed rows, each with its loss weight."""

from collections.abc import Iterator
from typing import Final

import torch
from tokenizers import Tokenizer

from tools.demo_model.conversation import Conversation, Document, Message
from tools.demo_model.tokenizer import BOS, END, END_OF_TEXT, ROLE_TOKENS, token_id

PROMPT_WEIGHT: Final = 0.05
"""The model must answer questions, not invent them; this small weight trains the embeddings."""
PROSE_WEIGHT: Final = 0.5
"""Stories are long and partly arbitrary; they must not outweigh answers of three tokens."""
PROSE_LENGTH: Final = 48
TASTE_WEIGHT: Final = 0.3
"""Answers forced by a grammar are mostly arbitrary, as long as they end."""

Weighted = list[tuple[int, float]]


def encode_document(tokenizer: Tokenizer, document: Document) -> Weighted:
    """Return (token id, loss weight) pairs, the ids exactly as the chat template gives them."""
    tokens: Weighted = [(token_id(tokenizer, BOS), 0.0)]
    if not isinstance(document, Conversation):
        ids = tokenizer.encode(document.text, add_special_tokens=False).ids
        ids.append(token_id(tokenizer, END_OF_TEXT))
        return tokens + [(token, PROSE_WEIGHT) for token in ids]
    for message in document.messages:
        tokens.append((token_id(tokenizer, ROLE_TOKENS[message.role]), 0.0))
        tokens.extend(_encode_message(tokenizer, message))
    return tokens


def _encode_message(tokenizer: Tokenizer, message: Message) -> Weighted:
    """Return the tokens after the role's token, including the end token."""
    encoding = tokenizer.encode(message.text, add_special_tokens=False)
    ids = [*encoding.ids, token_id(tokenizer, END)]
    weight = PROMPT_WEIGHT
    if message.num_given:
        weight = TASTE_WEIGHT
    elif message.role == "assistant":
        weight = 1.0 if len(ids) < PROSE_LENGTH else PROSE_WEIGHT
    num_given = sum(start < message.num_given for start, _ in encoding.offsets)
    return [(token, 0.0 if i < num_given else weight) for i, token in enumerate(ids)]


class PackedRows:
    """Cuts an endless stream of documents into rows without padding.

    A row may begin in the middle of a document and contain several. The model thereby learns that
    tokens before <|bos|> do not matter, and sees every position of a long context.
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
