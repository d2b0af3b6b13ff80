"""Chats are rendered in processes that hostile templates cannot leave, hold up or let grow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import tokenizers
from jinja2.defaults import DEFAULT_FILTERS

from coordinator.text import ChatTemplate, TemplateInput, Tokenizer
from coordinator.text import renderers as renderers_module
from coordinator.text.renderers import Renderers, encoded, rendered
from coordinator.text.threads import Asker
from pdserve.shared.errors import DeadlineExceeded, InvalidRequest
from tests.matrix import matrix
from tests.unit.coordinator.text import made_tokenizers as made

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = TemplateInput(messages=MESSAGES)
DOUBLED = (
    "{{% set ns = namespace(x={}) %}}{{% for i in range(40) %}}{{% set ns.x = {} %}}{{% endfor %}}"
)
ATTACKS = {
    "repeat": "{{ 'x' * 100000000000 }}",
    "power": "{{ (9 ** 999999) ** 999 }}",
    "concat": DOUBLED.format("'x'", "ns.x ~ ns.x"),
    "modulo": "{{ '%100000000000d' % 1 }}",
    "center": "{{ 'x' | center(100000000000) }}",
    "join": "{{ range(90000) | map('center', 90000) | join }}",
    "replace": DOUBLED.format("'x'", "ns.x.replace('x', 'xxxx')"),
    "wordwrap": "{{ ('x' * 90000000) | wordwrap(1) }}",
    "nested lists": DOUBLED.format("[1]", "[ns.x, ns.x]") + "{{ ns.x }}",
    "loops": "".join(f"{{% for {name} in range(90000) %}}" for name in "abcd") + "{% endfor %}" * 4,
}


@asynccontextmanager
async def rendering(source: str, cpu_s: float = 0.2, most: int = 1) -> AsyncIterator[Renderers]:
    renderers = Renderers(ChatTemplate(source, {"bos_token": "<s>"}), cpu_s, most)
    try:
        yield renderers
    finally:
        await renderers.close()


async def render(renderers: Renderers, chat: TemplateInput, asker: Asker | None = None) -> str:
    return rendered(await renderers.render(encoded(chat), asker or Asker())).text


def saying(content: str) -> TemplateInput:
    return TemplateInput(messages=[{"role": "user", "content": content}])


async def test_it_renders_as_the_template_does() -> None:
    source = "{{ bos_token }}{{ messages | tojson }}{{ tools }}{{ n }}{{ add_generation_prompt }}"
    chat = TemplateInput(
        messages=[{"role": "user", "content": 'é\n"\u2028'}, {"role": "assistant", "content": "a"}],
        tools=[{"name": "f", "parameters": {"x": 10**30, "y": 1.5, "z": None}}],
        variables={"n": [1, {"a": True}]},
        continue_final_message=False,
    )
    async with rendering(source) as renderers:
        for _ in range(2):
            expected = ChatTemplate(source, {"bos_token": "<s>"}).render(chat)
            assert await render(renderers, chat) == expected


@pytest.mark.parametrize("name", matrix(ATTACKS, 2))
async def test_attacks_are_ended_and_the_next_chat_is_rendered(name: str) -> None:
    source = f"{{% if messages[0].content == 'attack' %}}{ATTACKS[name]}{{% endif %}}"
    async with rendering(source + "{{ messages[0].content }}", cpu_s=0.1) as renderers:
        with pytest.raises(InvalidRequest, match="the chat template"):
            await render(renderers, saying("attack"))
        assert await render(renderers, saying("hello")) == "hello"


async def test_what_becomes_too_long_is_refused_with_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renderers_module, "_MAX_ANSWER_BYTES", 1 << 20)
    source = "{{ messages[0].content * (2 ** 20 if messages[0].content == 'xx' else 1) }}"
    async with rendering(source) as renderers:
        with pytest.raises(InvalidRequest, match="makes more than 1 MiB of them") as caught:
            await render(renderers, saying("xx"))
        assert caught.value.param == "messages"
        assert await render(renderers, saying("hello")) == "hello"


def test_nothing_is_computed_when_a_template_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    monkeypatch.setitem(DEFAULT_FILTERS, "upper", computed.append)
    ChatTemplate("{{ 'x' | upper }}{% set a = 'x' | upper %}{{ ['x' | upper] ~ 'x' }}")
    assert not computed


async def test_what_the_template_refuses_names_its_parameter() -> None:
    async with rendering("{{ raise_exception('roles must alternate') }}") as renderers:
        with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
            await render(renderers, CHAT)
        assert caught.value.param == "messages"
        reserved = TemplateInput(messages=MESSAGES, variables={"tools": 1})
        with pytest.raises(InvalidRequest) as caught:
            await render(renderers, reserved)
        assert caught.value.param == "chat_template_kwargs"


async def test_what_is_no_text_is_refused() -> None:
    async with rendering(r"{{ '\ud800' }}") as renderers:
        with pytest.raises(InvalidRequest, match="no text"):
            await render(renderers, CHAT)


async def test_who_leaves_costs_others_no_new_start() -> None:
    async with rendering("{{ messages[0].content }}") as renderers:
        await renderers.begin()
        pids = renderers.pids
        leaving = asyncio.create_task(render(renderers, saying("x" * 1000)))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await render(renderers, saying("hello")) == "hello"
        assert renderers.pids == pids


async def test_tenants_take_turns_and_deadlines_pass_while_waiting() -> None:
    order: list[str] = []

    async def ask(payer: str) -> None:
        await render(renderers, CHAT, Asker(payer))
        order.append(payer)

    async with rendering("{{ messages[0].content }}") as renderers:
        await renderers.begin()
        calls = [asyncio.create_task(ask(payer)) for payer in "aaaab"]
        late = asyncio.create_task(render(renderers, CHAT, Asker("c", time.monotonic() - 1.0)))
        await asyncio.gather(*calls)
        assert order.index("b") <= 2
        with pytest.raises(DeadlineExceeded):
            await late


async def test_chats_that_wait_have_another_process_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderers_module, "SLOW_S", 0.0)
    async with rendering("{{ messages[0].content }}", most=2) as renderers:
        await renderers.begin()
        said = await asyncio.gather(*(render(renderers, saying(str(n))) for n in range(8)))
        assert said == [*map(str, range(8))]
        async with asyncio.timeout(60.0):
            while len(renderers.pids) < 2:
                await asyncio.sleep(0.01)
        both = asyncio.gather(*(render(renderers, saying(str(n))) for n in range(2)))
        assert await both == ["0", "1"]


async def test_who_asks_like_another_before_is_not_rendered_again() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    )
    async with rendering(source) as renderers:
        template = ChatTemplate(source, {"bos_token": "<s>"})
        backend = tokenizers.Tokenizer.from_str(made.byte_level_json())
        tokenizer = Tokenizer(backend, None, template, renderers)
        for content in ("hello", " \n two words "):
            chat = saying(content)
            expected = tokenizer.encode(template.render(chat), add_special_tokens=False)
            assert await tokenizer.encode_chat(chat) == expected
            await renderers.close()
        assert not renderers.pids
