"""The tokenizers of GGUF files that are of SentencePiece, or like it: spaces are characters.

`llama` is BPE: of two neighbours, those are merged whose token has the highest score. `gemma4` is
BPE, too, and lists its merges. `t5` is a unigram model: of all ways to divide a text into tokens,
the one is taken whose scores have the largest sum. What is in no token becomes bytes, where there
are tokens for these, or is unknown.
"""

from __future__ import annotations

import math
from typing import Final

import tokenizers
from tokenizers import Regex, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre

from pdserve import _native
from pdserve.model_files.gguf.vocabulary import BYTE, NORMAL, UNUSED, Vocabulary

_SPACE: Final = "\u2581"


def by_scores(vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Return `llama`, and whether texts begin with bos unless the file says otherwise."""
    return _bpe(vocabulary, _merges(vocabulary), has_prefix=True), True


def by_merges(vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Return `gemma4`, likewise. Lines are merged apart."""
    backend = _bpe(vocabulary, vocabulary.merges(), has_prefix=False)
    backend.pre_tokenizer = pre.Split(Regex(r"\n+"), behavior="isolated")
    return backend, True


def unigram(vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Return `t5`, likewise."""
    fields = vocabulary.fields
    pieces = list(zip(vocabulary.tokens, vocabulary.scores(), strict=True))
    unknown = vocabulary.ids[vocabulary.named()["unk_token"]]
    backend = tokenizers.Tokenizer(
        models.Unigram(pieces, unknown, byte_fallback=BYTE in vocabulary.types)
    )
    steps: list[normalizers.Normalizer] = []
    if charsmap := vocabulary.charsmap():
        steps.append(normalizers.Precompiled(charsmap))
    if fields.boolean("remove_extra_whitespaces", False):
        end, inner = Regex(" +$"), Regex(" {2,}")
        steps += [normalizers.Replace(end, ""), normalizers.Replace(inner, " ")]
    backend.normalizer = normalizers.Sequence(steps)
    has_prefix = fields.boolean("add_space_prefix", False)
    # A text that begins with one gets no other.
    backend.pre_tokenizer = pre.Metaspace(_SPACE, "always" if has_prefix else "never")
    backend.decoder = _decoder(has_prefix=has_prefix)
    return backend, False


def _bpe(
    vocabulary: Vocabulary, merges: list[tuple[str, str]], *, has_prefix: bool
) -> tokenizers.Tokenizer:
    """`has_prefix`: a text gets a space at its begin, unless the file says otherwise."""
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.ids,
            merges,
            unk_token=vocabulary.named().get("unk_token"),
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
        )
    )
    has_prefix = vocabulary.fields.boolean("add_space_prefix", has_prefix)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    backend.decoder = _decoder(has_prefix=has_prefix)
    return backend


def _decoder(*, has_prefix: bool) -> decoders.Decoder:
    ends = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    spaces = decoders.Replace(_SPACE, " ")
    return decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *ends])


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that are a token together, those of the highest score first."""
    # Nothing is merged into others.
    scores = [
        score if kind in (NORMAL, UNUSED) else -math.inf
        for score, kind in zip(vocabulary.scores(), vocabulary.types, strict=True)
    ]
    return _native.token_pairs(vocabulary.tokens, scores)
