"""Small tokenizers of the families that matter, made on the spot."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "Hello world, this is a small test of a small tokenizer.",
    "The quick brown fox jumps over the lazy dog again and again.",
    "Größe, naïve café, 你好世界, emoji 😀😀👩‍👩‍👧 and more words to merge.",
    "STOP stopping stops the stopper. One two three four five six.",
] * 20

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def byte_level_json() -> str:
    """Byte-level BPE with BOS, EOS and some added tokens, as Llama 3 and Qwen have them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("｜wide｜"), AddedToken("a b")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer.to_str()


@cache
def byte_fallback_json(strip: bool = True) -> str:
    """SentencePiece-like BPE with byte fallback: Llama 2 (strip) and Gemma (no strip)."""
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz.,!", "ü", "▁a", "▁b", "▁c", "th", "▁th", "he"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁", "b"), ("▁", "c"), ("t", "h"), ("▁", "th"), ("h", "e")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    parts = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer.to_str()


@cache
def metaspace_json() -> str:
    """Unigram pieces behind a Metaspace decoder, as T5 and old SentencePiece conversions."""
    pieces = ["<unk>", "▁", *"abcdefgh", "▁a", "▁b", "ab", "cd", "▁gh"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0 - len(piece)) for piece in pieces], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer.to_str()


@cache
def word_piece_json() -> str:
    """WordPiece, whose decoder puts spaces between words and joins `##` pieces."""
    pieces = ["[UNK]", *"abcdefgh", "##a", "##b", "##cd", "gh", "."]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer.to_str()


@cache
def word_end_json() -> str:
    """BPE that marks where words end, so that a token's space comes with its successor."""
    pieces = ["<unk>", *"abcdefgh", *(f"{letter}</w>" for letter in "abcdefgh")]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer.to_str()


def write_checkpoint(folder: Path, tokenizer_json: str, **config: Any) -> Path:
    """A checkpoint folder as far as text goes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    values = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "TokenizersBackend"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values | config), encoding="utf-8")
    return folder
