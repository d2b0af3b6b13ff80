"""The tokenizer as served: lossless, digit by digit, with markers that text cannot split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pdserve.demo_model import CHECKPOINT_PATH
from tools.demo_model import corpus
from tools.demo_model.batches import PackedRows, encode_document
from tools.demo_model.conversation import Conversation, Message
from tools.demo_model.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, token_id

TOKENIZER = Tokenizer.from_file(str(CHECKPOINT_PATH / "tokenizer.json"))


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(text):
    for special in SPECIAL_TOKENS:
        text = text.replace(special, "")
    assert TOKENIZER.decode(encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["", " ", "\n\n\t ", "a  b", "ÿ\x00\x7f", "🦊👩‍🚀", "नमस्ते", "ça"])
def test_awkward_text_survives(text):
    assert TOKENIZER.decode(encode(text), skip_special_tokens=False) == text


def test_every_digit_is_a_token_of_its_own():
    assert TOKENIZER.encode("1234", add_special_tokens=False).tokens == ["1", "2", "3", "4"]


def test_special_tokens_come_first_and_are_single():
    assert [token_id(TOKENIZER, token) for token in SPECIAL_TOKENS] == list(
        range(len(SPECIAL_TOKENS))
    )
    for token in SPECIAL_TOKENS:
        assert encode(token) == [token_id(TOKENIZER, token)]
    with pytest.raises(KeyError):
        token_id(TOKENIZER, "<|no such token|>")


def test_plain_text_begins_with_bos():
    assert TOKENIZER.encode("Hello").ids[0] == token_id(TOKENIZER, "<|bos|>")


def test_the_vocabulary_is_the_one_of_the_model():
    config = json.loads((CHECKPOINT_PATH / "config.json").read_text())
    assert TOKENIZER.get_vocab_size() == config["vocab_size"] == VOCAB_SIZE


def test_packed_rows_lose_nothing_and_weigh_answers_most():
    documents = [
        corpus.dialogue([corpus.Exchange("test", "What is 1 + 1?", "1 + 1 = 2.")]),
        corpus.PlainText("Once upon a time."),
    ]
    tokens = [pair for document in documents for pair in encode_document(TOKENIZER, document)]
    rows = PackedRows(TOKENIZER, iter([*documents, *documents]))
    ids, weights = rows.take(1, len(tokens) - 1)
    assert ids[0].tolist() == [token for token, _ in tokens]
    by_text = dict(zip((TOKENIZER.id_to_token(i) for i in ids[0]), weights[0], strict=True))
    assert by_text["2"] == 1.0
    assert by_text["What" if "What" in by_text else "?"] < 0.2
    assert by_text["<|assistant|>"] == 0.0


def test_what_is_given_is_not_learned():
    given = Conversation((Message("user", "Hi"), Message("assistant", '{"a": 1}', num_given=1)))
    weights = [weight for _, weight in encode_document(TOKENIZER, given)]
    length = len(encode('{"a": 1}'))
    begun, *followed = weights[-length - 1 :]
    assert begun == 0.0
    assert min(followed) > 0.0
