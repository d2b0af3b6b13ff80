"""The tokenizer in a GGUF file, as one of the `tokenizers` library.

`gpt2` is byte-level BPE, whose words are divided as `tokenizer.ggml.pre` says. `llama` is BPE of
SentencePiece: of two neighbours, those are merged whose token has the highest score, and what is in
no token becomes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from pdserve.model_files.gguf.fields import GgufFields
from pdserve.model_files.gguf.model import GgufModel
from pdserve.model_files.gguf.pre_tokenizers import WORDS
from pdserve.shared.errors import ModelError, TokenizerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens

_PREFIX: Final = "tokenizer.ggml."
_NAMED: Final = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",  # the format spells it so
    "pad": "padding_token_id",
    "mask": "mask_token_id",
}
_SENTENCEPIECE_IDS: Final = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
# Of turns, in the formats of chats: files often name the end of texts alone.
_ENDS_OF_TURNS: Final = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"}
)
_SPACE: Final = "\u2581"  # SentencePiece's


class _Vocabulary:
    """What both kinds of tokenizers need of the file."""

    def __init__(self, model: GgufModel) -> None:
        self.fields = GgufFields(model.values, model.path).under(_PREFIX)
        self.where = str(model.path)
        self.tokens = [
            text or f"[EMPTY_{number}]" for number, text in enumerate(self.fields.texts("tokens"))
        ]
        self.ids = {text: number for number, text in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(t for number, t in enumerate(self.tokens) if self.ids[t] != number)
            raise TokenizerError(f"{self.where} has the token {twice!r} twice")
        self.types = self._each("token_type", int, NORMAL)

    def scores(self) -> list[float]:
        """Of all tokens."""
        if "scores" not in self.fields:
            raise TokenizerError(f"{self.where} lacks {_PREFIX}scores, which this tokenizer needs")
        return self._each("scores", float, 0.0)

    def named(self) -> dict[str, str]:
        """Name of a special token, such as bos_token |-> its text."""
        is_sentencepiece = self.fields.text("model") == "llama"
        defaults = _SENTENCEPIECE_IDS if is_sentencepiece else {}
        found: dict[str, str] = {}
        for name, key in _NAMED.items():
            token_id = self.id_of(key)
            token_id = defaults.get(key) if token_id is None else token_id
            if token_id is not None and token_id < len(self.tokens):
                found[f"{name}_token"] = self.tokens[token_id]
        return found

    def id_of(self, key: str) -> int | None:
        """The token that a key names; None: it names none."""
        if key not in self.fields:
            return None
        token_id = self.fields.integer(key, minimum=0)
        if token_id >= len(self.tokens):
            raise self.fields.error(key, f"one of the {len(self.tokens)} tokens")
        return token_id

    def added(self) -> list[AddedToken]:
        """Tokens that are found in a text before all else; control tokens are special."""
        return [
            AddedToken(text, special=kind == CONTROL, normalized=False)
            for text, kind in zip(self.tokens, self.types, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]

    def _each(self, key: str, kind: type[Any], default: Any) -> list[Any]:
        values = self.fields.raw(key)
        if values is None:
            return [default] * len(self.tokens)
        if not isinstance(values, list) or not all(isinstance(one, int | kind) for one in values):
            raise self.fields.error(key, "a list of numbers")
        if len(values) != len(self.tokens):
            raise TokenizerError(
                f"{self.where}: {_PREFIX}{key} has {len(values)} values for {len(self.tokens)} "
                "tokens"
            )
        return values


def tokenizer_of(model: GgufModel) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the tokenizer, and what tokenizer_config.json would say: tokens, chat templates.

    Raises:
        TokenizerError: it is of a kind that is not known, or damaged.
        ModelError: a value has the wrong type.
    """
    vocabulary = _Vocabulary(model)
    fields = vocabulary.fields
    kind = fields.text("model")
    if kind not in _BACKENDS:
        raise TokenizerError(
            f"{model.path}: the tokenizer {kind} ({_PREFIX}model) is not supported; supported are "
            f"{', '.join(_BACKENDS)}"
        )
    try:
        backend, adds_bos = _BACKENDS[kind](vocabulary)
        backend.add_tokens(vocabulary.added())
    except ModelError:
        raise
    except Exception as error:  # the bindings raise nothing more precise
        raise TokenizerError(f"{model.path}: its tokenizer cannot be made: {error}") from error
    named = vocabulary.named()
    backend.post_processor = _ends(
        named.get("bos_token") if fields.boolean("add_bos_token", adds_bos) else None,
        named.get("eos_token") if fields.boolean("add_eos_token", False) else None,
        vocabulary.ids,
    )
    return backend, named | _templates(GgufFields(model.values, model.path))


def end_ids(model: GgufModel) -> dict[int, list[str]]:
    """Return token id |-> the keys that say that it ends answers."""
    vocabulary = _Vocabulary(model)
    found: dict[int, list[str]] = {}
    for key in _END_KEYS:
        if (token_id := vocabulary.id_of(key)) is not None:
            found.setdefault(token_id, []).append(_PREFIX + key)
    for text in sorted(_ENDS_OF_TURNS & vocabulary.ids.keys()):
        token_id = vocabulary.ids[text]
        if vocabulary.types[token_id] == CONTROL and token_id not in found:
            found[token_id] = [f"its text, {text}"]
    return found


def _gpt2(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    fields = vocabulary.fields
    name = fields.text("pre", "")
    words = WORDS.get(name)
    if words is None:
        named = f"names the pre-tokenizer {name!r}" if name else "names no pre-tokenizer"
        raise TokenizerError(
            f"{vocabulary.where} {named} ({_PREFIX}pre), and texts would be divided wrongly; "
            f"known are {', '.join(sorted(WORDS))}"
        )
    merges = []
    for merge in fields.texts("merges"):
        # A token may begin with a space.
        space = merge.find(" ", 1)
        if space < 0:
            raise TokenizerError(
                f"{vocabulary.where}: {_PREFIX}merges has {merge!r}, which are not two tokens"
            )
        merges.append((merge[:space], merge[space + 1 :]))
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary.ids, merges, ignore_merges=words.keeps_whole)
    )
    if words.composes:
        backend.normalizer = normalizers.NFC()
    splits = [pre.Split(Regex(one), behavior="isolated") for one in words.expressions]
    to_bytes = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, words.adds_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    unknown = vocabulary.named()["unk_token"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.ids,
            _merges(vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
        )
    )
    spaces, texts = normalizers.Replace(" ", _SPACE), [decoders.Replace(_SPACE, " ")]
    has_prefix = vocabulary.fields.boolean("add_space_prefix", True)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    )
    ends = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([*texts, decoders.ByteFallback(), decoders.Fuse(), *ends])
    return backend, True


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that are a token together, those of the highest score first."""
    ids, scores = vocabulary.ids, vocabulary.scores()
    merges = []
    for text, token_id in ids.items():
        if vocabulary.types[token_id] not in (NORMAL, UNUSED):
            continue  # nothing is merged into it
        for end in range(1, len(text)):
            first = text[:end]
            if first in ids and (second := text[end:]) in ids:
                merges.append((-scores[token_id], ids[first], ids[second], first, second))
    merges.sort()
    return [(first, second) for *_, first, second in merges]


_BACKENDS: Final = {"gpt2": _gpt2, "llama": _sentencepiece}


def _ends(bos: str | None, eos: str | None, ids: Mapping[str, int]) -> processors.PostProcessor:
    """What is added to a text."""
    parts = [bos, "$A", eos]
    return processors.TemplateProcessing(
        single=[part for part in parts if part is not None],
        special_tokens=[(text, ids[text]) for text in (bos, eos) if text is not None],
    )


def _templates(fields: GgufFields) -> dict[str, Any]:
    """As tokenizer_config.json has them: a list of named ones."""
    prefix = "chat_template"
    named = {"default": fields.text(f"tokenizer.{prefix}", "")}
    others = fields.under(f"tokenizer.{prefix}.")
    named |= {name: others.text(name) for name in others.names()}
    listed = [{"name": name, "template": text} for name, text in named.items() if text]
    return {prefix: listed} if listed else {}
