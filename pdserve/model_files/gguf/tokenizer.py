"""The tokenizer in a GGUF file, as one of the `tokenizers` library.

`gpt2` is byte-level BPE, whose words are divided as `tokenizer.ggml.pre` says. Others are kinds of
SentencePiece (`sentencepiece.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from pdserve.model_files.gguf.fields import GgufFields
from pdserve.model_files.gguf.model import GgufModel
from pdserve.model_files.gguf.pre_tokenizers import WORDS, Words
from pdserve.model_files.gguf.sentencepiece import by_merges, by_scores, unigram
from pdserve.model_files.gguf.vocabulary import CONTROL, PREFIX, Vocabulary
from pdserve.shared.errors import ModelError, TokenizerError

_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
# Of turns, in the formats of chats: files often name the end of texts alone.
_ENDS_OF_TURNS: Final = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"}
)
_ENDS_OF_HARMONY: Final = frozenset({"<|return|>", "<|call|>"})
_END_OF_MESSAGE: Final = "<|end|>"  # there, of which an answer has several


def tokenizer_of(model: GgufModel) -> tuple[tokenizers.Tokenizer, dict[str, Any], list[str]]:
    """Return the tokenizer, what tokenizer_config.json would say of it, and all tokens by id.

    Raises:
        TokenizerError: it is of a kind that is not known, or damaged.
        ModelError: a value has the wrong type.
    """
    vocabulary = Vocabulary(model)
    fields = vocabulary.fields
    kind = _kind(vocabulary)
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
        named.get("eos_token") if fields.boolean("add_eos_token", kind == "t5") else None,
        vocabulary.ids,
    )
    templates = _templates(GgufFields(model.values, model.path))
    return backend, named | templates, vocabulary.tokens


def check_tokenizer(model: GgufModel) -> None:
    """Check what can be known without making it, which takes a second. Raises as `tokenizer_of`."""
    vocabulary = Vocabulary(model)
    kind = _kind(vocabulary)
    _ = vocabulary.ids  # no token is there twice
    vocabulary.named()
    if kind in ("llama", "t5"):
        vocabulary.scores()
    else:
        vocabulary.merges()
    if kind == "gpt2":
        _words(vocabulary)


def end_ids(model: GgufModel) -> dict[int, list[str]]:
    """Return token id |-> the keys that say that it ends answers."""
    vocabulary = Vocabulary(model)
    found: dict[int, list[str]] = {}
    for key in _END_KEYS:
        if (token_id := vocabulary.id_of(key)) is not None:
            found.setdefault(token_id, []).append(PREFIX + key)
    if (default := vocabulary.default_end()) is not None:
        found.setdefault(default, [f"its id, where {PREFIX}eos_token_id is absent"])
    known = _ENDS_OF_TURNS | _ENDS_OF_HARMONY
    texts = {
        text: token_id
        for token_id, text in enumerate(vocabulary.tokens)
        if text in known and vocabulary.types[token_id] == CONTROL
    }
    if texts.keys() >= _ENDS_OF_HARMONY:
        texts.pop(_END_OF_MESSAGE, None)
    for text, token_id in texts.items():
        found.setdefault(token_id, [f"its text, {text}"])
    return found


def _kind(vocabulary: Vocabulary) -> str:
    kind = vocabulary.fields.text("model")
    if kind not in _BACKENDS:
        raise TokenizerError(
            f"{vocabulary.where}: the tokenizer {kind} ({PREFIX}model) is not supported; supported "
            f"are {', '.join(_BACKENDS)}"
        )
    return kind


def _words(vocabulary: Vocabulary) -> Words:
    name = vocabulary.fields.text("pre", "")
    if name in WORDS:
        return WORDS[name]
    named = f"names the pre-tokenizer {name!r}" if name else "names no pre-tokenizer"
    raise TokenizerError(
        f"{vocabulary.where} {named} ({PREFIX}pre), and texts would be divided wrongly; "
        f"known are {', '.join(sorted(WORDS))}"
    )


def _gpt2(vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    words = _words(vocabulary)
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=words.keeps_whole)
    )
    if words.composes:
        backend.normalizer = normalizers.NFC()
    splits = [pre.Split(Regex(one), behavior="isolated") for one in words.expressions]
    to_bytes = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, words.adds_bos


_BACKENDS: Final = {"gpt2": _gpt2, "llama": by_scores, "gemma4": by_merges, "t5": unigram}


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
