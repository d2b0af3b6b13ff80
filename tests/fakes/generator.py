"""A cluster that follows a script, and what tests need around it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import tokenizers

from coordinator.generation import GenerationRequest, Listener, Route
from coordinator.models.model import Catalog, make_model
from coordinator.text import ChatTemplate, Tokenizer
from pdserve._native import TokenRun, add_tokens
from pdserve.protocol import FinishReason, PromptLogprobs, TokenEvent, TokenLogprobs
from pdserve.protocol.status import ClusterStatus, NodeStatus
from pdserve.shared.errors import RequestCancelled
from tests.unit.coordinator.text import made_tokenizers as made

MODEL = "org/tiny-model"
EOS = 1
TOOL_TEMPLATE = (
    "{% if tools %}<|user|>{{ tools | tojson }} <tool_call>\n{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinks %}<think>\n{% endif %}{% endif %}"
)


@cache
def tiny_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(made.byte_level_json())
    template = ChatTemplate(made.CHAT_TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"})
    return Tokenizer(backend, chat_template=template)


@cache
def compiled(template: str = TOOL_TEMPLATE) -> ChatTemplate:
    """Compiling one takes longer than most tests with it."""
    return ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})


@cache
def tool_tokenizer(template: str = TOOL_TEMPLATE) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(made.byte_level_json())
    return Tokenizer(backend, chat_template=compiled(template))


@dataclass(frozen=True)
class Tokens:
    """Tokens that come together."""

    ids: list[int]
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    logprob: float = -0.5  # of each, if they are asked for
    accepted: int = 0  # of these: they were drafts
    refused: int = 0


@dataclass(frozen=True)
class Pause:
    """Nothing comes for a while, or until `until` is set."""

    seconds: float = 0.0
    until: asyncio.Event | None = None


Step = Tokens | Pause | Exception
Script = Callable[[GenerationRequest], Sequence[Step]]


def says(text: str, *, per_event: int = 1, pause_s: float = 0.0) -> Script:
    """A model that says `text`, then ends with EOS."""
    ids = tiny_tokenizer().encode(text, add_special_tokens=False)

    def script(request: GenerationRequest) -> list[Step]:
        steps: list[Step] = []
        for i in range(0, len(ids), per_event):
            steps += [Pause(pause_s), Tokens(ids[i : i + per_event])]
        return [*steps, Pause(pause_s), Tokens([EOS], FinishReason.STOP, EOS)]

    return script


ON_NODES = Route("prefill-0", "decode-0")


class FakeGeneration:
    """One scripted request; after `cancel` its listener is told RequestCancelled."""

    def __init__(self, request: GenerationRequest, script: Sequence[Step]) -> None:
        self.request = request
        self.output = TokenRun()
        self.route = ON_NODES
        self.cancels: list[str] = []
        self.is_left = False
        self.is_over = False
        self._script = script
        self._cancelled = asyncio.Event()
        self._playing: asyncio.Task[None] | None = None

    def cancel(self, reason: str) -> None:
        self.cancels.append(reason)
        self._cancelled.set()

    def leave(self) -> None:
        self.is_left = True

    def listen(
        self, listener: Listener, on_tokens: Callable[[TokenRun], None] | None = None
    ) -> None:
        self._playing = asyncio.create_task(self._play(listener, on_tokens))

    async def _play(self, listener: Listener, on_tokens: Callable[[TokenRun], None] | None) -> None:
        index = 0
        max_tokens = self.request.sampling.max_tokens
        for step in self._script:
            if isinstance(step, Pause):
                await self._pause(step)
            if self._cancelled.is_set():
                step = RequestCancelled(self.cancels[0])
            if isinstance(step, Exception):
                listener(step)
                return
            if isinstance(step, Tokens):
                ids = step.ids[: max_tokens - index]
                ends = index + len(ids) == max_tokens
                self.is_over = ends or step.finish is not None
                event = self._event(step, ids, index, ends=ends)
                if on_tokens is not None and _is_plain(event):
                    self._run_on(ids, on_tokens)
                else:
                    self.output.extend(ids)
                    listener(event)
                index += len(ids)
                if self.is_over:
                    return

    def _run_on(self, ids: list[int], on_tokens: Callable[[TokenRun], None]) -> None:
        self.output.open(math.inf)
        for token_id in ids:
            row = [""], [len(self.output)], [token_id]
            begun, _, _ = add_tokens({"": self}, *row, time.monotonic())
            if begun:
                on_tokens(self.output)

    async def _pause(self, step: Pause) -> None:
        waits = [asyncio.ensure_future(self._cancelled.wait())]
        if step.until is not None:
            waits.append(asyncio.ensure_future(step.until.wait()))
        try:
            await asyncio.wait(
                waits,
                timeout=step.seconds if step.until is None else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for wait in waits:
                wait.cancel()

    def _event(self, step: Tokens, ids: list[int], index: int, *, ends: bool) -> TokenEvent:
        sampling = self.request.sampling
        num_logprobs, listed = sampling.logprobs, sampling.logprob_token_ids
        finish = step.finish or (FinishReason.LENGTH if ends else None)
        return TokenEvent(
            request_id=self.request.request_id,
            index=index,
            token_ids=ids,
            logprobs=[]
            if num_logprobs is None
            else [_logprobs(i, num_logprobs, step.logprob, listed) for i in ids],
            finish_reason=finish,
            stop_token_id=step.stop_token_id,
            accepted=step.accepted,
            refused=step.refused,
            cached_tokens=3 if index == 0 else 50,  # a decode node has pulled them all
            prompt_logprobs=None if index else self._prompt_logprobs(),
            embedding=b"" if self.request.sampling.pooling is None else self._embedding(),
        )

    def _embedding(self) -> bytes:
        """Four dimensions that tell prompts apart."""
        ids = self.request.prompt.token_ids
        return np.array([len(ids), ids[0], ids[-1], -1.0], "<f4").tobytes()

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        """At position i: log-probability -i and rank i; tokens 1, 2 .. are likelier."""
        num_top = self.request.sampling.prompt_logprobs
        if num_top is None:
            return None
        top = list(range(1, num_top + 1))
        found = [
            TokenLogprobs(
                chosen=-float(i), top_ids=top, top_logprobs=[-0.1 * n for n in top], rank=i
            )
            for i in range(1, len(self.request.prompt.token_ids))
        ]
        return PromptLogprobs.of(found)


def _is_plain(event: TokenEvent) -> bool:
    """Whether nothing is to be said of later tokens but what they are."""
    is_more = event.logprobs or event.accepted or event.refused or event.finish_reason is not None
    return event.index > 1 and not is_more


def _logprobs(token_id: int, count: int, chosen: float, listed: list[int]) -> TokenLogprobs:
    others = listed or [(token_id + n) % 400 for n in range(count)]
    values = [chosen - n for n in range(len(others))]
    return TokenLogprobs(chosen=chosen, top_ids=others, top_logprobs=values)


@dataclass
class FakeGenerator:
    """Starts scripted requests and remembers them."""

    script: Script = field(default_factory=lambda: says("Hello world"))
    max_model_len: int | None = 512
    max_inflight: int = 300
    ready: bool = True
    nodes: list[NodeStatus] = field(default_factory=list)
    start_error: Exception | None = None
    route: Route = ON_NODES  # of all requests
    generations: list[FakeGeneration] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, request: GenerationRequest) -> FakeGeneration:
        if self.start_error is not None:
            raise self.start_error
        generation = FakeGeneration(request, self.script(request))
        generation.route = self.route
        self.generations.append(generation)
        self.started.set()
        return generation

    def start_siblings(self, requests: Sequence[GenerationRequest]) -> list[FakeGeneration]:
        return [self.start(request) for request in requests]

    def is_ready(self) -> bool:
        return self.ready

    def status(self) -> ClusterStatus:
        return ClusterStatus(
            model=MODEL, mode="adaptive", ready=self.ready, inflight=7, nodes=self.nodes
        )

    @property
    def last(self) -> FakeGeneration:
        return self.generations[-1]


def waits_for(gate: asyncio.Event) -> FakeGenerator:
    """Says "Hello", and " world" once the gate is open."""
    ids = tiny_tokenizer().encode("Hello", add_special_tokens=False)
    rest = says(" world")

    def script(request: Any) -> list[Step]:
        return [Tokens(ids), Pause(until=gate), *rest(request)]

    return FakeGenerator(script)


def tiny_catalog() -> Catalog:
    """One model, which a fake generates."""
    return Catalog([make_model(FakeGenerator(), tiny_tokenizer(), [MODEL])])
