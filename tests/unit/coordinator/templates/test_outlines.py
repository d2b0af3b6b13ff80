"""Outlines give what the template gives, of all contents, or say that they cannot."""

from __future__ import annotations

from itertools import product

import pytest

from coordinator.templates.outline import Hole, Outline, Outlines, shape_of
from coordinator.templates.template import ChatTemplate, TemplateInput
from coordinator.templates.traced import Tracer

CONTENTS = (
    "hello",
    "",
    "  two words\n",
    "a</think>\n\nb",
    "<tool_response>x</tool_response>",
    '{{ "q" }} | \\ <b>',
)
USUAL = {
    "copied": "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}</s>\n{% endfor %}",
    "joined": "{% for m in messages %}{{ '<' + m.role + '>' + m.content ~ '</s>' }}{% endfor %}",
    "set": (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% set content = m.content | trim %}"
        "{% if content is string and content is not none %}{% set ns.s = ns.s + content %}"
        "{% endif %}{% endfor %}{% set block %}[{{ ns.s }}]{% endset %}{{ block ~ loop }}"
    ),
    "macro": (
        "{% macro show(m) %}<{{ m.role }}>{{ m.content.strip() }}{% endmacro %}"
        "{% for m in messages %}{{ show(m) ~ '|' }}{% endfor %}{{ messages | length }}"
    ),
    "asked": (
        "{% for m in messages %}{% set c = m.content %}"
        "{% if m.role == 'assistant' and '</think>' in c %}THOUGHT{% else %}"
        "{% if c.startswith('<tool_response>') and c.endswith('</tool_response>') %}TOOL"
        "{% elif c %}{{ c.lstrip('\\n') }}{% elif c == 'hello' %}never{% else %}NOTHING"
        "{% endif %}{% endif %}{% endfor %}"
    ),
    "compared": "{% for m in messages %}{{ 1 if m.content in ['a', 'hello'] else 2 }}{% endfor %}",
    "selected": "{{ messages | rejectattr('content', 'equalto', '') | list | length }}",
    "chosen": "{% for m in messages %}{{ m.content or 'nothing' }}{% endfor %}",
    "ignored": "{{ messages[0].role }}{{ tools }}{{ messages[0].content._text }}",
}
_EACH = "{% for m in messages %}{{ X }}{% endfor %}"
LOOKED_INTO = {
    name: _EACH.replace("X", expression)
    for name, expression in {
        "length": "m.content | length",
        "truncated": "m.content[:3]",
        "split": "m.content.split('</think>')[-1]",
        "capitals": "m.content | upper",
        "method": "m.content.upper()",
        "json": "m.content | tojson",
        "message": "m",
        "replaced": "m.content | replace('a', 'b')",
        "formatted": "'%s' | format(m.content)",
        "modulo": "'%10s' % m.content",
        "brackets": "'{}'.format(m.content)",
        "number": "m.content | int",
        "real": "m.content | float",
        "letters": "m.content | list",
        "last": "m.content | last",
        "backwards": "m.content | reverse",
        "times": "m.content * 2",
        "within": "'true' if m.content in 'hello' else 'false'",
        "less": "m.content < 'i'",
        "key": "{m.content: 1}[m.content]",
        "sequence": "m.content is sequence",
        "iterable": "m.content is iterable",
        "upper": "m.content is upper",
        "unknown": "m.content.unknown",
        "prefixes": "m.content.startswith(('a', 'b'))",
        "both": "('x' + m.content).strip()",
        "contents": "messages | map(attribute='content') | join",
        "distinct": "messages | unique(attribute='content') | list | length",
        "same": "m.content == messages[0].content ~ ''",
        "now": "m.content ~ strftime_now('%s')",
        "chance": "m.content ~ ([1, 2, 3] | random)",
        "escaped": "m.content | e",
    }.items()
} | {"autoescape": "{% autoescape true %}{{ messages[0].content }}{% endautoescape %}"}


def chat(*contents: str) -> TemplateInput:
    roles = ("user", "assistant")
    return TemplateInput(
        messages=[{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    )


def outline_of(template: ChatTemplate, contents: tuple[str, ...]) -> Outline | None:
    told = chat(*contents)
    return Tracer(template).outline(told, template.render(told))


@pytest.mark.parametrize("name", USUAL)
def test_contents_are_filled_in_as_the_template_would(name: str) -> None:
    template = ChatTemplate(USUAL[name], {"bos_token": "<s>"})
    num_filled = 0
    for traced in product(CONTENTS, repeat=2):
        outline = outline_of(template, traced)
        assert outline is not None
        for contents in product(CONTENTS, repeat=2):
            filled = outline.filled(contents)
            if filled is not None:
                assert filled == template.render(chat(*contents)), (traced, contents)
                num_filled += 1
        assert outline.filled(traced) is not None
    assert num_filled > len(CONTENTS) ** 2


@pytest.mark.parametrize("name", LOOKED_INTO)
def test_what_looks_into_contents_has_no_outline(name: str) -> None:
    template = ChatTemplate(LOOKED_INTO[name])
    tracer, told = Tracer(template), chat("12", "34")
    try:
        text = template.render(told)
    except Exception:  # noqa: BLE001 - some of them refuse these contents
        text = ""
    assert tracer.outline(told, text) is None


def test_an_outline_that_gives_another_text_is_not_taken() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert Tracer(template).outline(chat("a"), "b") is None


def test_shapes_differ_by_all_but_contents() -> None:
    told = [
        chat("a"),
        chat("a", "b"),
        TemplateInput(messages=[{"role": "system", "content": "a"}]),
        TemplateInput(messages=chat("a").messages, add_generation_prompt=False),
        TemplateInput(messages=chat("a").messages, variables={"n": 1}),
        TemplateInput(messages=chat("a").messages, tools=[{"name": "f"}]),
        TemplateInput(messages=chat("a").messages, documents=[{"text": "d"}]),
    ]
    shapes = [shape_of(one) for one in told]
    assert None not in shapes
    assert len({*shapes}) == len(told)
    assert shape_of(chat("b")) == shapes[0]
    named = {"role": "user", "content": "a", "name": "b"}
    assert shape_of(TemplateInput(messages=[named])) is None
    assert shape_of(TemplateInput(messages=chat("a").messages, continue_final_message=True)) is None
    assert shape_of(chat("a" * (1 << 19))) is None


def test_only_some_shapes_and_outlines_are_kept() -> None:
    outlines = Outlines()
    for number in range(200):
        outlines.add(b"%d" % number, Outline((Hole(0),)))
    assert outlines.text(b"0", chat("a")) is None
    assert outlines.text(b"199", chat("a")) == "a"
    outlines.add(b"199", Outline(("x" * (1 << 17),)))
    assert outlines.text(b"199", chat("a")) == "a"


def test_shapes_that_have_no_outline_are_not_tried_for_ever() -> None:
    outlines, num_tried = Outlines(), 0
    while outlines.wants(b"shape"):
        assert not outlines.wants(b"shape"), "one is tried already"
        outlines.add(b"shape", None)
        num_tried += 1
    assert num_tried == 4
    assert outlines.wants(b"another")
