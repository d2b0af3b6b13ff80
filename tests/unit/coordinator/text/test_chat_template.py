"""Chat templates: as transformers renders them, within bounds, and with errors that help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.text import ChatTemplate, TemplateInput, Tokenizer
from pdserve.shared.errors import InvalidRequest, TokenizerError
from tests.matrix import matrix
from tests.unit.coordinator.text import made_tokenizers as made

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say <b>'hi'</b> & \"bye\" in ü."},
    {"role": "assistant", "content": "hi, "},
]
TEMPLATES = {
    "plain": made.CHAT_TEMPLATE,
    "blocks": (
        "{% for message in messages %}\n"
        "    {% if loop.index0 == 0 %}\n"
        "{{ bos_token }}\n"
        "    {% endif %}\n"
        "{{ message['role'] | upper }}: {{ message['content'] | trim }}\n"
        "{% endfor %}\n"
        "{%- if add_generation_prompt %}ASSISTANT:{%- endif %}\n"
    ),
    "loopcontrols": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.content }}|{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "tojson": (
        "{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(indent=2) }}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}{% if tools is none %} no tools{% endif %}{{ strftime_now('%Y') }}"
        "{% if unknown is defined %}?{% endif %}{{ flag | default('unset') }}"
    ),
    "macro": (
        "{% macro show(m) %}<{{ m.role }}>{{ m.content.strip() }}{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}{% endfor %}{{ messages[::-1][0].role }}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", matrix([True, False], 1))
def test_renders_like_transformers(name: str, add_generation_prompt: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = made.write_checkpoint(tmp_path, made.byte_level_json(), chat_template=TEMPLATES[name])
    ours = Tokenizer.from_checkpoint(folder).chat_template
    theirs = AutoTokenizer.from_pretrained(str(folder))
    assert ours is not None
    variations: list[dict[str, Any]] = [{}, {"flag": "set"}]
    for variables in variations:
        expected = theirs.apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
        )
        conversation = TemplateInput(
            messages=MESSAGES, add_generation_prompt=add_generation_prompt, variables=variables
        )
        assert ours.render(conversation) == expected


def test_contents_are_parts_where_a_template_reads_nothing_else(tmp_path: Path) -> None:
    """As Gemma 3's first one reads system messages."""
    from transformers import AutoTokenizer

    source = (
        "{{ messages[0]['content'][0]['text'] + '\n\n' }}{% for m in messages[1:] %}{{ m.role }}: "
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}|{% endfor %}"
    )
    folder = made.write_checkpoint(tmp_path, made.byte_level_json(), chat_template=source)
    ours = Tokenizer.from_checkpoint(folder).chat_template
    assert ours is not None
    parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]
    theirs = AutoTokenizer.from_pretrained(str(folder))
    assert ours.render(TemplateInput(messages=MESSAGES)) == theirs.apply_chat_template(
        parts, tokenize=False
    )
    failing = source.replace("part.text", "part.text.missing.name")
    with pytest.raises(InvalidRequest, match="'str object' has no attribute 'text'"):
        ChatTemplate(failing).render(TemplateInput(messages=MESSAGES))


def test_arguments_are_text_where_a_template_takes_no_others() -> None:
    """As DeepSeek's do."""
    source = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}{% endfor %}"
    )
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    call = {"id": "c", "type": "function", "function": function}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    rendered = ChatTemplate(source).render(TemplateInput(messages=[*MESSAGES, asked]))
    assert rendered == 'weather {"city": "Köln"}'


@pytest.mark.parametrize("name", ["plain", "generation"])
def test_continues_the_final_message_like_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = made.write_checkpoint(tmp_path, made.byte_level_json(), chat_template=TEMPLATES[name])
    theirs = AutoTokenizer.from_pretrained(str(folder))
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, continue_final_message=True)
    ours = Tokenizer.from_checkpoint(folder).chat_template
    assert ours is not None
    continued = TemplateInput(
        messages=MESSAGES, continue_final_message=True, add_generation_prompt=False
    )
    assert ours.render(continued) == expected
    assert expected.endswith("hi, ")


def test_final_message_left_out() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match="leaves out the final message"):
        template.render(TemplateInput(messages=MESSAGES, continue_final_message=True))


@pytest.mark.parametrize("as_list", [True, False])
def test_template_from_config_or_file(as_list: bool, tmp_path: Path) -> None:
    source = "config {{ messages[0].content }}"
    named = [{"name": "tool_use", "template": "-"}, {"name": "default", "template": source}]
    folder = made.write_checkpoint(
        tmp_path, made.byte_level_json(), chat_template=named if as_list else source
    )
    conversation = TemplateInput(messages=MESSAGES)
    template = Tokenizer.from_checkpoint(folder).chat_template
    assert template is not None
    assert template.render(conversation) == "config Be brief."
    (folder / "chat_template.jinja").write_text("file")
    template = Tokenizer.from_checkpoint(folder).chat_template
    assert template is not None
    assert template.render(conversation) == "file"


TOOLS = [{"type": "function", "function": {"name": "f"}}]
D, T = "default {{ tools is none }}", "tools {{ tools[0].function.name }}"
NAMED = [{"name": "default", "template": D}, {"name": "tool_use", "template": T}]
FOLDERS: list[tuple[Any, dict[str, str], str, str]] = [
    # in the config, in files, without tools, with tools
    (NAMED, {}, "default True", "tools f"),
    ({"default": D, "tool_use": T}, {}, "default True", "tools f"),
    (D, {"additional_chat_templates/tool_use.jinja": T}, "default True", "tools f"),
    (
        None,
        {"chat_template.jinja": D, "additional_chat_templates/tool_use.jinja": T},
        "default True",
        "tools f",
    ),
    (NAMED, {"chat_template.jinja": "file"}, "file", "tools f"),
    (NAMED, {"additional_chat_templates/rag.jinja": "-"}, "default True", "tools f"),
    (D, {}, "default True", "default False"),
    ([{"name": "tool_use", "template": D}], {}, "default True", "default False"),
]


@pytest.mark.parametrize(("config", "files", "plain", "with_tools"), FOLDERS)
async def test_a_template_for_tools_is_used_where_there_are_tools(
    config: Any, files: dict[str, str], plain: str, with_tools: str, tmp_path: Path
) -> None:
    values = {} if config is None else {"chat_template": config}
    folder = made.write_checkpoint(tmp_path, made.byte_level_json(), **values)
    for name, source in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)
    template = Tokenizer.from_checkpoint(folder).chat_template
    assert template is not None
    for tools, expected in (([], plain), (TOOLS, with_tools)):
        assert template.render(TemplateInput(messages=MESSAGES, tools=tools)) == expected


@pytest.mark.parametrize("config", [5, [D], [{"name": "x"}], {"default": 5}, {"a": D, "b": D}])
def test_what_is_no_template_is_told_so(config: Any, tmp_path: Path) -> None:
    folder = made.write_checkpoint(tmp_path, made.byte_level_json(), chat_template=config)
    with pytest.raises(TokenizerError, match=r"chat.template"):
        Tokenizer.from_checkpoint(folder)


def test_special_tokens_given_as_objects(tmp_path: Path) -> None:
    folder = made.write_checkpoint(
        tmp_path,
        made.byte_level_json(),
        bos_token={"content": "<s>", "lstrip": False},
        chat_template="{{ bos_token }}{{ eos_token }}{{ pad_token }}",
    )
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "</s>"}))
    template = Tokenizer.from_checkpoint(folder).chat_template
    assert template is not None
    assert template.render(TemplateInput(messages=MESSAGES)) == "<s></s></s>"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.nothing.at_all }}", "no attribute"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 1 / 0 }}", "zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(1000000000) | list }}", "range"),
    ],
)
def test_errors_of_templates_are_the_clients(source: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        ChatTemplate(source).render(TemplateInput(messages=MESSAGES))


def test_variables_cannot_replace_the_messages() -> None:
    variables: dict[str, Any] = {"messages": []}
    with pytest.raises(InvalidRequest, match="cannot set 'messages'"):
        ChatTemplate("x").render(TemplateInput(messages=MESSAGES, variables=variables))
