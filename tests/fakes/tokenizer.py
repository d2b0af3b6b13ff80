"""The tiny tokenizer, which counts the work that it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection

import tokenizers

from coordinator.text import Tokenizer
from tests.fakes.generator import compiled
from tests.unit.coordinator.text import made_tokenizers as made


class FakeTokenizer(Tokenizer):
    """Tells how many characters it encodes, and how many ids it looks at."""

    def __init__(
        self,
        on_text: Callable[[int], object] = lambda num_chars: None,
        on_ids: Callable[[int], object] = lambda num_ids: None,
        max_chars_per_token: int | None = None,
    ) -> None:
        """`max_chars_per_token`: None: that of its tokens."""
        backend = tokenizers.Tokenizer.from_str(made.byte_level_json())
        super().__init__(backend, chat_template=compiled())
        self._on_text = on_text
        self._on_ids = on_ids
        self._max_chars_per_token = max_chars_per_token

    @property
    def max_chars_per_token(self) -> int:
        return self._max_chars_per_token or super().max_chars_per_token

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._on_text(len(text))
        return super().encode(text, add_special_tokens=add_special_tokens)

    def check_ids(self, token_ids: Collection[int], param: str) -> None:
        self._on_ids(len(token_ids))
        super().check_ids(token_ids, param)
