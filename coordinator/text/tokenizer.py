"""A checkpoint's tokenizer: text to token ids and back.

Built on `tokenizers` and a checkpoint's `tokenizer.json`, with the same results as transformers 5
for the same files. In particular, only the post-processor in `tokenizer.json` decides whether a BOS
token is added; `add_bos_token` in `tokenizer_config.json` merely describes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import tokenizers

from coordinator.text.chat_template import ChatTemplate, Conversation
from coordinator.text.checkpoint import load_chat_template
from coordinator.text.parts import ToolFormat, detect_tool_format
from coordinator.text.pieces import TokenPieces
from pdserve.errors import InvalidRequest
from pdserve.tokenizer_files import TokenizerConfig, prepare_backend, read_tokenizer

T = TypeVar("T")

LONG_TEXT_CHARS = 8192  # about a millisecond of work; longer texts go to a thread
_NUM_THREADS = 2
_MAX_SHRINKAGE = 4  # normalisers compose characters: Unicode NFC makes one of up to three


class Tokenizer:
    """Encodes prompts and decodes outputs; holds the special tokens and the chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: TokenizerConfig | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        config = config or TokenizerConfig()
        self._backend = backend
        self.chat_template = chat_template
        self.named_special_tokens = config.named_special_tokens  # bos_token and so on
        prepare_backend(backend, config)
        self._pieces = TokenPieces(backend)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        vocab = backend.get_vocab(with_added_tokens=True)
        self._num_ids = 1 + max(vocab.values(), default=-1)
        self._longest_token = max(map(len, vocab), default=0)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")

    @classmethod
    def from_checkpoint(cls, folder: Path) -> Tokenizer:
        """Load the text files of a checkpoint folder. Raises TokenizerError."""
        backend, config = read_tokenizer(folder)
        source = load_chat_template(folder, config)
        variables = config.named_special_tokens
        template = ChatTemplate(source, variables) if source is not None else None
        return cls(backend, config, template)

    @property
    def num_ids(self) -> int:
        """Upper bound of the token ids, exclusive."""
        return self._num_ids

    @property
    def max_chars_per_token(self) -> int:
        """A text of n tokens has at most n times this many characters."""
        return _MAX_SHRINKAGE * self._longest_token

    @property
    def is_byte_level(self) -> bool:
        """Whether tokens are exact bytes."""
        return self._pieces.is_byte_level

    def is_special(self, token_id: int) -> bool:
        """Return whether this is a control token, not text."""
        return token_id in self._special_ids

    @property
    def tool_format(self) -> ToolFormat | None:
        """The model's format of tool calls, detected from its chat template; None if unknown."""
        return detect_tool_format(self.chat_template.source) if self.chat_template else None

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this text; None if there is none."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with exactly this text; None if there is none."""
        return self._backend.token_to_id(text)

    @property
    def special_ids(self) -> frozenset[int]:
        """All control tokens."""
        return self._special_ids

    def to_json(self) -> str:
        """Return the whole tokenizer in the format of tokenizer.json."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text; `add_special_tokens` lets the post-processor add BOS and so on."""
        # The fast variant skips character offsets, which take most of the time under the GIL.
        encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encodings[0].ids

    async def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Do the same as `encode`; a long text is encoded in a thread."""
        (encoded,) = await self.encode_texts([text], add_special_tokens=add_special_tokens)
        return encoded

    async def encode_texts(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Encode several texts; in a thread if they are long together."""

        def encode() -> list[list[int]]:
            return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        return await self._run(encode, sum(map(len, texts)) > LONG_TEXT_CHARS)

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """Render and encode a conversation. Raises InvalidRequest if the template refuses it."""
        template = self.chat_template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template, so it cannot answer chat messages; "
                "use /v1/completions"
            )

        def render_and_encode() -> list[int]:
            text = template.render(conversation)
            return self.encode(text, add_special_tokens=conversation.add_special_tokens)

        return await self._run(render_and_encode, conversation.is_longer_than(LONG_TEXT_CHARS))

    async def _run(self, work: Callable[[], T], is_long: bool) -> T:
        if not is_long:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of all these tokens."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of all these tokens, special ones included; in a thread if many."""

        def decode() -> str:
            return self.decode(token_ids, skip_special_tokens=False)

        return await self._run(decode, len(token_ids) > LONG_TEXT_CHARS)

    async def vocabulary_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary has them, so that none is ambiguous.

        A token may be a part of a character, which is no text. In a thread if they are many.
        """

        def show() -> list[str]:
            return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

        return await self._run(show, len(token_ids) > LONG_TEXT_CHARS)

    def exact_bytes(self, token_id: int) -> bytes | None:
        """See `TokenPieces.exact`."""
        return self._pieces.exact(token_id)

    def whole_text(self, token_id: int) -> str | None:
        """See `TokenPieces.whole`; valid if no character is incomplete before the token."""
        return self._pieces.whole(token_id)

    def shown_bytes(self, token_id: int) -> bytes:
        """See `TokenPieces.shown`; the bytes may be a part of a character."""
        return self._pieces.shown(token_id)
