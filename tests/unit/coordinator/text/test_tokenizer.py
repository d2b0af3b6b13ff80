"""Loading a checkpoint's tokenizer; equality with transformers on the same files."""

from __future__ import annotations

import asyncio
import json
import threading
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from msgspec import structs

from coordinator.text import TemplateInput, Tokenizer
from coordinator.text.tokenizer import LONG_TEXT_CHARS
from pdserve.shared.errors import InvalidRequest, TokenizerError
from tests.fakes.tokenizer import FakeTokenizer
from tests.unit.coordinator.text import made_tokenizers as made

TEXTS = [
    "Hello world",
    "",
    " a  b ",
    "你好 😀 </s> <think> x",
    "｜wide｜a b<|user|>",
    "line\n\n\ttab",
]
FAMILIES = {
    "byte_level": made.byte_level_json,
    "llama_2": made.byte_fallback_json,
    "metaspace": made.metaspace_json,
}


def from_transformers(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_encodes_and_decodes_like_transformers(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = made.write_checkpoint(tmp_path, FAMILIES[family](), **config)
    ours, theirs = Tokenizer.from_checkpoint(folder), from_transformers(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            if family != "metaspace":  # transformers gives <s> a new id there, beyond the model's
                assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == expected


def test_the_post_processor_alone_adds_bos(tmp_path: Path) -> None:
    folder = made.write_checkpoint(tmp_path, made.byte_level_json(), add_bos_token=False)
    ours = Tokenizer.from_checkpoint(folder)
    assert ours.encode("x", add_special_tokens=True)[0] == 0
    assert ours.encode("x", add_special_tokens=False)[0] != 0


def test_prompts_share_their_ids_but_for_those_of_no_token() -> None:
    backend = tokenizers.Tokenizer.from_str(made.byte_level_json())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 100_000)]
    )
    ours = Tokenizer(backend)
    (first,), (second,) = (ours.encode("<think>", add_special_tokens=False) for _ in range(2))
    assert first > 256  # which Python shares anyway
    assert first is second
    assert ours.encode("<think>", add_special_tokens=True) == [100_000, first]


def test_config_marks_tokens_as_special(tmp_path: Path) -> None:
    folder = made.write_checkpoint(
        tmp_path, made.byte_level_json(), additional_special_tokens=["<think>", "<absent>"]
    )
    ours = Tokenizer.from_checkpoint(folder)
    ids = ours.encode("a<think>b<absent>", add_special_tokens=False)
    assert ours.decode(ids) == "ab<absent>"
    assert max(ids) < ours.num_ids


def test_added_tokens_of_the_config_are_added(tmp_path: Path) -> None:
    next_id = Tokenizer.from_checkpoint(
        made.write_checkpoint(tmp_path / "a", made.byte_level_json())
    ).num_ids
    added = {str(next_id): {"content": "<new>", "special": True}, "9999": {"content": "<far>"}}
    folder = made.write_checkpoint(
        tmp_path / "b", made.byte_level_json(), added_tokens_decoder=added
    )
    ours = Tokenizer.from_checkpoint(folder)
    assert ours.encode("<new>", add_special_tokens=False) == [next_id]
    assert ours.num_ids == next_id + 1


def test_special_tokens_as_plain_text(tmp_path: Path) -> None:
    folder = made.write_checkpoint(tmp_path, made.byte_level_json(), split_special_tokens=True)
    ours = Tokenizer.from_checkpoint(folder)
    assert 1 not in ours.encode("</s>", add_special_tokens=False)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{"}, "cannot be read"),
        (
            {"tokenizer.json": made.byte_level_json(), "tokenizer_config.json": "{"},
            "not valid JSON",
        ),
        ({"tokenizer.json": made.byte_level_json(), "tokenizer_config.json": "[]"}, "object"),
        ({"tokenizer.json": made.byte_level_json(), "chat_template.jinja": "{% if %}"}, "compiled"),
        (
            {
                "tokenizer.json": made.byte_level_json(),
                "tokenizer_config.json": '{"chat_template": [{"name": "rag", "template": ""}]}',
            },
            "'default'",
        ),
    ],
)
def test_unusable_checkpoints(files: dict[str, str], says: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=says):
        Tokenizer.from_checkpoint(tmp_path)


def test_what_is_said_of_tekken_alone_helps(tmp_path: Path) -> None:
    tokens = [bytes([i]) for i in range(256)] + [b"ab"]
    vocab = [{"rank": i, "token_bytes": b64encode(t).decode()} for i, t in enumerate(tokens)]
    special = [{"rank": i, "token_str": text} for i, text in enumerate(("<unk>", "<s>", "</s>"))]
    sizes = {"default_vocab_size": 260, "default_num_special_tokens": 3}
    file = {"config": {"pattern": "[a-z]+|.", **sizes}, "vocab": vocab, "special_tokens": special}
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    with pytest.raises(TokenizerError) as info:
        Tokenizer.from_checkpoint(tmp_path)
    told = str(info.value).partition("e.g. with ")[2]
    exec(told.removesuffix(" (pip install mistral-common)"), {"folder": str(tmp_path)})
    assert Tokenizer.from_checkpoint(tmp_path).encode("ab z", add_special_tokens=False) == [
        259,
        35,
        125,
    ]


async def test_chats_of_checkpoints_are_rendered_in_a_process(tmp_path: Path) -> None:
    ours = Tokenizer.from_checkpoint(
        made.write_checkpoint(
            tmp_path,
            made.byte_level_json(),
            chat_template="{% if tools %}{{ 'x' * 100000000000 }}{% endif %}"
            "{{ messages[0].content }}",
        )
    )
    assert ours.chat_template is not None
    try:
        for content in ("hello", "hello " * LONG_TEXT_CHARS):
            chat = TemplateInput(messages=[{"role": "user", "content": content}])
            expected = ours.encode(ours.chat_template.render(chat), add_special_tokens=False)
            assert await ours.encode_chat(chat) == expected
            with pytest.raises(InvalidRequest, match="too much memory"):
                await ours.encode_chat(structs.replace(chat, tools=[{"name": "f"}]))
    finally:
        await ours.close()


async def test_no_chat_template_is_said(tmp_path: Path) -> None:
    ours = Tokenizer.from_checkpoint(made.write_checkpoint(tmp_path, made.byte_level_json()))
    with pytest.raises(InvalidRequest, match="no chat template"):
        await ours.encode_chat(TemplateInput(messages=[{"role": "user", "content": "x"}]))


async def test_long_texts_leave_the_event_loop_alone(tmp_path: Path) -> None:
    ours = Tokenizer.from_checkpoint(made.write_checkpoint(tmp_path, made.byte_level_json()))
    text = "hello world, this is long. " * (40 * LONG_TEXT_CHARS // 27)
    expected = ours.encode(text, add_special_tokens=True)
    encoding = asyncio.ensure_future(ours.encode_texts([text], add_special_tokens=True))
    num_turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert await encoding == [expected]
    assert num_turns > 2


@pytest.mark.parametrize(
    ("beside", "is_long"),
    [
        ({}, False),
        ({"tools": [{"description": "x" * LONG_TEXT_CHARS}]}, True),
        ({"variables": {"hints": ["x"] * LONG_TEXT_CHARS}}, True),
    ],
)
async def test_long_tools_leave_the_event_loop_alone(beside: dict[str, Any], is_long: bool) -> None:
    threads: list[threading.Thread] = []
    ours = FakeTokenizer(on_text=lambda _: threads.append(threading.current_thread()))
    await ours.encode_chat(TemplateInput(messages=[{"role": "user", "content": "x"}], **beside))
    assert [thread is not threading.main_thread() for thread in threads] == [is_long]
