"""Unigram tokenizers in GGUF files: the same tokens as the fast ones that they were made from."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from pdserve.model_files.gguf.charsmap import fault_of
from pdserve.model_files.tokenizer import read_tokenizer
from pdserve.shared.errors import ModelError, TokenizerError
from tests.unit.model_files.test_gguf_tokenizer import CORPUS, odd_texts, write

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CONTROL = ["<pad>", "</s>", "<unk>"]
BECOMES = dict.fromkeys("\t\n\r\u00a0\u3000", " ") | {"ﬁ": "fi", "½": "1⁄2", "…": "..."}


def charsmap(becomes: dict[str, str] = BECOMES) -> bytes:
    """As SentencePiece compiles it, but sparse: each node of the tree has 256 places of its own."""
    texts, values = b"", {}
    for before, after in becomes.items():
        values[before.encode()] = len(texts)
        texts += after.encode() + b"\0"
    nodes = sorted({key[:end] for key in values for end in range(len(key) + 1)})
    place_of = {node: 256 * number for number, node in enumerate(nodes, 1)}
    units = [0] * 256 * (len(nodes) + 1)
    units[0] = place_of[b""] << 10
    for node in nodes[1:]:
        at = place_of[node[:-1]] + node[-1]
        units[at] = (at ^ place_of[node]) << 10 | (node in values) << 8 | node[-1]
        units[place_of[node]] = values.get(node, 0) | 1 << 31
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + texts


def fast(*, has_bytes: bool) -> Tokenizer:
    """As transformers converts one of SentencePiece."""
    spaces = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainee = Tokenizer(models.Unigram())
    trainee.pre_tokenizer = spaces
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=CONTROL, unk_token="<unk>", show_progress=False
    )
    trainee.train_from_iterator(CORPUS, trainer)
    pieces = [tuple(piece) for piece in json.loads(trainee.to_str())["model"]["vocab"]]
    pieces += [(byte, 0.0) for byte in BYTES] * has_bytes
    made = Tokenizer(models.Unigram(pieces, CONTROL.index("<unk>"), byte_fallback=has_bytes))
    made.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(charsmap()),
            normalizers.Strip(left=False, right=True),
            normalizers.Replace(Regex(" {2,}"), "▁"),
        ]
    )
    made.pre_tokenizer = spaces
    ends = [decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    made.add_special_tokens(CONTROL)
    return made


def as_gguf(made: Tokenizer, file: Path, **changes: Any) -> Path:
    pieces = json.loads(made.to_str())["model"]["vocab"]
    kinds = dict.fromkeys(BYTES, 6) | dict.fromkeys(CONTROL, 3) | {"<unk>": 2}
    values: dict[str, Any] = {
        "tokenizer_model": "t5",
        "token_scores": [score for _, score in pieces],
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
        "precompiled_charsmap": charsmap(),
    }
    ids = {text: number for number, (text, _) in enumerate(pieces)}
    return write(file, ids, kinds, **values | changes)


@pytest.mark.parametrize("has_bytes", [True, False])
def test_tokens_are_those_of_the_fast_tokenizer(has_bytes: bool, tmp_path: Path) -> None:
    made = fast(has_bytes=has_bytes)
    backend, config = read_tokenizer(as_gguf(made, tmp_path / "t.gguf"))
    for text in [*CORPUS, "", " ", "ﬁ½", *odd_texts(400)]:
        expected = made.encode(text, add_special_tokens=False).ids
        assert backend.encode(text, add_special_tokens=False).ids == expected, text
        assert backend.decode(expected) == made.decode(expected)
    named = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    assert config.named_special_tokens == named
    assert backend.encode("a").ids[-1] == CONTROL.index("</s>"), "files say if there is none"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"precompiled_charsmap": b""}, "ﬁ"),
        ({"remove_extra_whitespaces": False}, "a   b"),
        ({"add_space_prefix": False}, "Hello"),
    ],
)
def test_what_the_file_says_of_texts_counts(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    made = fast(has_bytes=True)
    changes = {key: value for key, value in changes.items() if value != b""}
    whole = as_gguf(made, tmp_path / "whole.gguf")
    other = as_gguf(made, tmp_path / "other.gguf", **changes or {"precompiled_charsmap": None})
    found = [read_tokenizer(file)[0].encode(text).ids for file in (whole, other)]
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precompiled_charsmap": b"\x04\0\0\0abc"}, "of its 7 bytes, it says that 4 come first"),
        ({"precompiled_charsmap": b"\x04\0\0\0\0\xff\0\0a\0"}, "it leads to .*, and has 1 places"),
        ({"precompiled_charsmap": charsmap()[:-3] + b"\xff.\0"}, "not UTF-8"),
        ({"unk_token_id": 10**6}, "unknown_token_id is 1000000"),
    ],
)
def test_a_damaged_one_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = as_gguf(fast(has_bytes=False), tmp_path / "t.gguf", **changes)
    with pytest.raises((TokenizerError, ModelError), match=said):
        read_tokenizer(file)


def test_scores_are_finite(tmp_path: Path) -> None:
    made = fast(has_bytes=False)
    scores = [float("nan")] * made.get_vocab_size()
    with pytest.raises(ModelError, match=r"scores is .*finite"):
        read_tokenizer(as_gguf(made, tmp_path / "t.gguf", token_scores=scores))


def test_no_damaged_array_leads_astray() -> None:
    """What is not refused can be used: the library would end the process."""
    chosen, whole = random.Random(0), charsmap()
    used = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(chosen.randrange(1, 4)):
            damaged[chosen.randrange(4, len(damaged))] = chosen.randrange(256)
        if not fault_of(bytes(damaged)):
            used += 1
            normalizer = normalizers.Precompiled(bytes(damaged))
            for text in [*CORPUS, *BECOMES]:
                normalizer.normalize_str(text)
    assert 0 < used < 400
