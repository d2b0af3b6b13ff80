"""A checkpoint's tokenizer: text to token ids and back.

Built on `tokenizers` and a checkpoint's `tokenizer.json`, with the same results as transformers 5
for the same files. In particular, only the post-processor in `tokenizer.json` decides whether a BOS
token is added; `add_bos_token` in `tokenizer_config.json` merely describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import tokenizers

from coordinator.templates.outline import shape_of
from coordinator.templates.template import ChatTemplate, TemplateInput
from coordinator.text.checkpoint import DEFAULT, TOOL_USE, load_chat_templates
from coordinator.text.detokenizer import TokenPieces
from coordinator.text.parts import ToolFormat, detect_tool_format
from coordinator.text.renderers import Renderers, encoded, rendered
from coordinator.text.threads import Asker, TextThreads
from pdserve.model_files.tokenizer import TokenizerConfig, prepare_backend, read_tokenizer
from pdserve.shared.errors import ContextLengthExceeded, InvalidRequest, Overloaded

T = TypeVar("T")

ANYBODY = Asker()
LONG_TEXT_CHARS = 1024  # a fifth of a millisecond of work; longer texts go to a thread
PROBED_CHARS = 16  # per token of the context; texts have about 4
_SURPLUS = 2  # the end of a text may change how its beginning is divided, but not as much
_MAX_SHRINKAGE = 4  # normalisers compose characters: Unicode NFC makes one of up to three


class Tokenizer:
    """Encodes prompts and decodes outputs; holds the special tokens and the chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: TokenizerConfig | None = None,
        chat_template: ChatTemplate | None = None,
        renderers: Renderers | None = None,
        num_ids: int | None = None,
        path: Path | None = None,
    ) -> None:
        """Chats are rendered by `renderers`; without them here, without any limits.

        `num_ids` is the model's, which may have ids that stand for no text; None: as many as here.
        `path` is the checkpoint's, if it is of one.
        """
        config = config or TokenizerConfig()
        self._backend = backend
        self.path = path
        self.chat_template = chat_template
        self.renderers = renderers
        self.named_special_tokens = config.named_special_tokens  # bos_token and so on
        prepare_backend(backend, config)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.pieces = TokenPieces(backend, self._special_ids)
        texts = config.tokens
        if texts is None:
            vocab = backend.get_vocab(with_added_tokens=True)
            texts, self._end = [*vocab], 1 + max(vocab.values(), default=-1)
        else:
            self._end = len(texts)  # of the tokens that have a text
        self._num_ids = self._end if num_ids is None else num_ids
        self._ids = [*range(self._end)]  # each is one object in all prompts, which live long
        self._longest_token = max(map(len, texts), default=0)
        self._threads = TextThreads()

    @classmethod
    def from_checkpoint(
        cls, folder: Path, num_ids: int | None = None, chat_template: str = ""
    ) -> Tokenizer:
        """Load the text files of a checkpoint folder; `chat_template`: a file instead of its own.

        Raises TokenizerError.
        """
        backend, config = read_tokenizer(folder)
        sources, template = load_chat_templates(folder, config, chat_template), None
        if sources:
            variables = config.named_special_tokens
            template = ChatTemplate(sources[DEFAULT], variables, sources.get(TOOL_USE))
        renderers = None if template is None else Renderers(template)
        return cls(backend, config, template, renderers, num_ids, folder)

    async def begin(self) -> None:
        """Start a process that renders chats, before there are any."""
        if self.renderers is not None:
            with suppress(Overloaded):  # chats try again
                await self.renderers.begin()

    async def close(self) -> None:
        """End the processes that render chats."""
        if self.renderers is not None:
            await self.renderers.close()

    @property
    def num_ids(self) -> int:
        """Upper bound of the token ids, exclusive: all below are taken wherever a client gives ids.

        Models sample ids that their tokenizers lack, since their embeddings are padded.
        """
        return self._num_ids

    def check_ids(self, token_ids: Collection[int], param: str) -> None:
        """Check that the model has all these token ids. Raises InvalidRequest."""
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < self._num_ids:
                raise InvalidRequest(
                    f"{param!r} has token id {token_id}, which is out of vocabulary: there are "
                    f"{self._num_ids} tokens, with ids from 0 to {self._num_ids - 1}",
                    param,
                )

    @property
    def max_chars_per_token(self) -> int:
        """A text of n tokens has at most n times this many characters."""
        return _MAX_SHRINKAGE * self._longest_token

    @property
    def num_texts(self) -> int:
        """Number of tokens that have a text."""
        return self._end

    def tokens_from(self, first_id: int) -> dict[int, str]:
        """Return token id |-> text of all tokens from this id on, in order."""
        if first_id >= self._end:
            return {}
        vocab = self._backend.get_vocab(with_added_tokens=True)
        return dict(sorted((i, text) for text, i in vocab.items() if i >= first_id))

    def is_special(self, token_id: int) -> bool:
        """Return whether this is a control token, not text."""
        return token_id in self._special_ids

    @property
    def tool_format(self) -> ToolFormat | None:
        """The model's format of tool calls, detected from its chat template; None if unknown."""
        return detect_tool_format(self.chat_template.tool_source) if self.chat_template else None

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
        ids = encodings[0].ids
        try:
            return [*map(self._ids.__getitem__, ids)]
        except IndexError:  # a post-processor may add what no token is
            return ids

    def encode_fitting(
        self, text: str, *, add_special_tokens: bool, max_tokens: int | None
    ) -> list[int]:
        """Do the same as `encode`, but give up a text that is far longer than `max_tokens`.

        Its beginning alone is enough to know that. Raises ContextLengthExceeded.
        """
        num_chars = len(text) if max_tokens is None else PROBED_CHARS * max_tokens
        while max_tokens is not None and num_chars < len(text):
            num_tokens = len(self.encode(text[:num_chars], add_special_tokens=False))
            if num_tokens > _SURPLUS * max_tokens:
                raise ContextLengthExceeded(
                    f"this model's maximum context length is {max_tokens} tokens, but the first "
                    f"{num_chars} of the prompt's {len(text)} characters have {num_tokens} already"
                )
            num_chars *= 2
        return self.encode(text, add_special_tokens=add_special_tokens)

    async def encode_texts(
        self,
        texts: Sequence[str],
        asker: Asker = ANYBODY,
        *,
        add_special_tokens: bool,
        max_tokens: int | None = None,
    ) -> list[list[int]]:
        """Encode several texts with `encode_fitting`; long ones in threads.

        Many texts take many turns, so others get theirs in between. Raises ContextLengthExceeded,
        and what `TextThreads.run` raises.
        """
        found: list[list[int]] = []
        for some in _batches(texts):

            def encode(some: Sequence[str] = some) -> list[list[int]]:
                return [
                    self.encode_fitting(
                        text, add_special_tokens=add_special_tokens, max_tokens=max_tokens
                    )
                    for text in some
                ]

            is_long = len(some) < len(texts) or sum(map(len, some)) > LONG_TEXT_CHARS
            found += await self._run(encode, asker, is_long)
        return found

    async def encode_chat(
        self,
        conversation: TemplateInput,
        asker: Asker = ANYBODY,
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Render and encode a conversation with `encode_fitting`; a long one in a thread.

        Raises InvalidRequest if the template refuses it, and what `encode_texts` raises.
        """
        template = self.chat_template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template, so it cannot answer chat messages; "
                "use /v1/completions"
            )

        text = None
        if self.renderers is not None:
            text = await self._rendered(conversation, self.renderers, asker)

        def render_and_encode() -> list[int]:
            return self.encode_fitting(
                template.render(conversation) if text is None else text,
                add_special_tokens=conversation.add_special_tokens,
                max_tokens=max_tokens,
            )

        is_long = (
            conversation.is_longer_than(LONG_TEXT_CHARS)
            if text is None
            else len(text) > LONG_TEXT_CHARS
        )
        return await self._run(render_and_encode, asker, is_long)

    async def _rendered(
        self, conversation: TemplateInput, renderers: Renderers, asker: Asker
    ) -> str:
        """Return the text of a conversation: by an outline, or from a process."""
        shape, outlines = shape_of(conversation), renderers.outlines
        if shape is not None and (text := outlines.text(shape, conversation)) is not None:
            return text
        wants_outline, outline = shape is not None and outlines.wants(shape), None
        try:
            question = await self._run(
                partial(encoded, conversation, wants_outline=wants_outline),
                asker,
                conversation.is_longer_than(LONG_TEXT_CHARS),
            )
            answer = await renderers.render(question, asker)
            found = await self._run(partial(rendered, answer), asker, len(answer) > LONG_TEXT_CHARS)
            outline = found.outline
        finally:
            if shape is not None and wants_outline:
                outlines.add(shape, outline)
        return found.text

    async def _run(self, work: Callable[[], T], asker: Asker, is_long: bool) -> T:
        return await self._threads.run(work, asker) if is_long else work()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of all these tokens."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def decode_all(self, token_ids: Sequence[int], asker: Asker = ANYBODY) -> str:
        """Return the text of all these tokens, special ones included; in a thread if many."""

        def decode() -> str:
            return self.decode(token_ids, skip_special_tokens=False)

        return await self._run(decode, asker, len(token_ids) > LONG_TEXT_CHARS)

    async def vocabulary_strings(
        self, token_ids: Sequence[int], asker: Asker = ANYBODY
    ) -> list[str]:
        """Return the tokens as the vocabulary has them, so that none is ambiguous.

        A token may be a part of a character, which is no text. In a thread if they are many.
        """

        def show() -> list[str]:
            return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

        return await self._run(show, asker, len(token_ids) > LONG_TEXT_CHARS)


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Divide texts into runs of some that are short together, or a single long one."""
    first = num_chars = 0
    for index, text in enumerate(texts):
        if index > first and num_chars + len(text) > LONG_TEXT_CHARS:
            yield texts[first:index]
            first, num_chars = index, 0
        num_chars += len(text)
    if texts:
        yield texts[first:]
