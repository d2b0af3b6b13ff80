"""Tokenizers in GGUF files: the same tokens as the fast tokenizers that they were made from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.model_files.end_tokens import end_tokens
from pdserve.model_files.gguf.pre_tokenizers import WORDS
from pdserve.model_files.tokenizer import read_tokenizer
from pdserve.shared.errors import ModelError, TokenizerError
from tests.gguf_files import gguf

CORPUS = [
    "Hello, world! It's 2024 now; they'll say we've 12345 things, aren't they? I'D SAY so.",
    "def f(x):\n    return x + 1\n\n\n\t\tif x  ==   3: pass\r\n",
    "Übergrößenträger, naïve café, Ångström — “quotes” … 你好，世界！",
    "こんにちは 안녕하세요 привет мир",
    "🤗🚀 👨‍👩‍👧 é é ½ ³ ੧੨੩ <tag> {json: [1,2]} https://a.b/c?d=e&f=g",
] * 3
PIECES = [*" \n\t\r.,'!?0123456789", "'s", "'LL", "<|end|>"]
PIECES += [*"abcXYZéßЖ你好世한ิ\u0301\u00a0\u3000½🤗"]
PIECES += ["  ", "\r\n", "hello", "World", "return", "<eot>", "<0x41>", "▁"]
# As the tokenizers of these models have it.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def odd_texts(count: int) -> list[str]:
    chosen = random.Random(0)
    return [
        "".join(chosen.choice(PIECES) for _ in range(chosen.randrange(1, 40))) for _ in range(count)
    ]


def split(*parts: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(list(parts))


def by(expression: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(expression), behavior="isolated")


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
OF_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m"
    r"|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t"
    r"|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = LLAMA3.replace("{1,3}", "{1}").replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
FAST = {
    "tiny_aya": (None, split(by(r"\d{1,3}(?=(?:\d{3})*\b)"), by(GPT4O), BYTES)),
    "seed-coder": (None, split(by(SEED), BYTES)),
    "llama-bpe": (None, split(by(LLAMA3), BYTES)),
    "qwen2": (normalizers.NFC(), split(by(LLAMA3.replace("{1,3}", "")), BYTES)),
    "gpt-2": (None, OF_GPT2),
    "smollm": (None, split(pre_tokenizers.Digits(individual_digits=True), OF_GPT2)),
}


def write(file: Path, ids: dict[str, int], kinds: dict[str, int], **values: Any) -> Path:
    writer = gguf.GGUFWriter(file, "llama")
    texts = sorted(ids, key=lambda text: ids[text])
    writer.add_token_list(texts)
    writer.add_token_types([kinds.get(text, 1) for text in texts])
    for key, value in values.items():
        if value is not None:
            getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def trained(name: str) -> Tokenizer:
    normalizer, words = FAST[name]
    made = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer, made.decoder = words, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens(["<bos>", "<|end|>"])
    return made


def as_gguf(made: Tokenizer, file: Path, name: str) -> Path:
    model = json.loads(made.to_str())["model"]
    return write(
        file,
        made.get_vocab(),
        {"<bos>": 3, "<|end|>": 3},
        tokenizer_model="gpt2",
        tokenizer_pre=name,
        token_merges=[" ".join(merge) for merge in model["merges"]],
        bos_token_id=made.token_to_id("<bos>"),
        eos_token_id=made.token_to_id("<|end|>"),
    )


@pytest.mark.parametrize("name", FAST)
def test_byte_level_tokens_are_those_of_the_fast_tokenizer(name: str, tmp_path: Path) -> None:
    made = trained(name)
    backend, config = read_tokenizer(as_gguf(made, tmp_path / "t.gguf", name))
    for text in [*CORPUS, *odd_texts(400)]:
        expected = made.encode(text, add_special_tokens=False).ids
        assert backend.encode(text, add_special_tokens=False).ids == expected, text
        assert backend.decode(expected) == made.decode(expected)
    bos = [made.token_to_id("<bos>")] if name == "llama-bpe" else []
    assert backend.encode("a").ids == [*bos, made.token_to_id("a")]
    assert config.named_special_tokens == {"bos_token": "<bos>", "eos_token": "<|end|>"}


def sentencepiece(*, has_prefix: bool) -> tuple[Tokenizer, dict[str, int], list[float]]:
    """As the tokenizer of Llama 2, or of Gemma: the fast one, its tokens, and their scores."""
    spaces = normalizers.Replace(" ", "▁")
    normal = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    trainee = Tokenizer(models.BPE())
    trainee.normalizer = normal
    words = pre_tokenizers.Split("▁", behavior="merged_with_next")
    trainee.pre_tokenizer = words
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    trainee.train_from_iterator(CORPUS, trainer)
    learnt = json.loads(trainee.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merged = [first + second for first, second in learnt["merges"]]
    alphabet = sorted({*learnt["vocab"]} - {*merged})
    ids = {text: number for number, text in enumerate([*first, *merged, *alphabet, "<eot>"])}
    scores = [0.0] * len(first) + [-float(n) for n in range(len(ids) - len(first))]
    model = models.BPE(
        ids,
        [tuple(merge) for merge in learnt["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    made = Tokenizer(model)
    made.normalizer = normal
    ends = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    made.add_special_tokens(["<s>", "</s>", "<eot>"])
    return made, ids, scores


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_tokens_are_those_of_the_fast_tokenizer(
    has_prefix: bool, tmp_path: Path
) -> None:
    made, ids, scores = sentencepiece(has_prefix=has_prefix)
    kinds = {text: 6 for text in ids if text.startswith("<0x")}
    kinds |= {"<unk>": 2, "<s>": 3, "</s>": 3, "<eot>": 3}
    file = write(
        tmp_path / "t.gguf",
        ids,
        kinds,
        tokenizer_model="llama",
        token_scores=scores,
        add_space_prefix=has_prefix,
        eot_token_id=ids["<eot>"],
        chat_template=[
            {"name": "default", "template": "{{ a }}"},
            {"name": "tool_use", "template": "{{ b }}"},
        ],
    )
    backend, config = read_tokenizer(file)
    for text in [*CORPUS, *odd_texts(400)]:
        expected = made.encode(text, add_special_tokens=False).ids
        assert backend.encode(text, add_special_tokens=False).ids == expected, text
        assert backend.decode(expected) == made.decode(expected)
    assert backend.encode("").ids == [ids["<s>"]]
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert config.named_special_tokens == named
    assert [one["name"] for one in config.values["chat_template"]] == ["default", "tool_use"]
    assert set(end_tokens(resolve_checkpoint(str(file)))) == {ids["<eot>"], ids["</s>"]}


def test_an_answer_of_harmony_does_not_end_with_its_first_message(tmp_path: Path) -> None:
    texts = ["<|end|>", "<|return|>", "<|call|>", "a"]
    for kinds, ends in (({0: 3, 1: 3, 2: 3}, {1, 2}), ({0: 3, 1: 3}, {0, 1})):
        file = write(
            tmp_path / "t.gguf",
            {text: i for i, text in enumerate(texts)},
            {texts[i]: kind for i, kind in kinds.items()},
            tokenizer_model="gpt2",
            tokenizer_pre="gpt-4o",
            token_merges=[],
            eos_token_id=1,
        )
        assert set(end_tokens(resolve_checkpoint(str(file)))) == ends


def test_expressions_are_all_valid(tmp_path: Path) -> None:
    texts = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    ids = {text: i for i, text in enumerate(texts)}
    for name in WORDS:
        file = write(
            tmp_path / f"{name}.gguf",
            ids,
            {},
            tokenizer_model="gpt2",
            tokenizer_pre=name,
            token_merges=["a b"],
        )
        backend, _ = read_tokenizer(file)
        for text in CORPUS[:4]:
            assert backend.decode(backend.encode(text).ids).encode() == text.encode()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer_pre": "odd"}, "names the pre-tokenizer 'odd' .*known are .*llama-bpe"),
        ({"tokenizer_pre": ""}, "names no pre-tokenizer"),
        (
            {"tokenizer_model": "rwkv"},
            "tokenizer rwkv .*not supported; supported are gpt2, llama, gemma4, t5",
        ),
        ({"token_merges": ["ab"]}, "not two tokens"),
        ({"token_merges": ["a c"]}, "cannot be made"),
        ({"bos_token_id": 3}, "bos_token_id is 3; it must be one of the 3 tokens"),
        ({"tokenizer_model": "llama"}, "lacks .*scores"),
        ({"tokenizer_model": "llama", "token_scores": [1.0]}, "scores has 1 values for 3 tokens"),
    ],
)
def test_what_cannot_be_a_tokenizer_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    values = {"tokenizer_model": "gpt2", "tokenizer_pre": "gpt-2", "token_merges": ["a b"]} | change
    file = write(tmp_path / "t.gguf", {"a": 0, "b": 1, "ab": 2}, {}, **values)
    with pytest.raises((TokenizerError, ModelError), match=said):
        read_tokenizer(file)
