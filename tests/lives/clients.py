"""What clients ask for, and what they are told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

from msgspec.structs import replace

from coordinator.adapters.bounds import not_found
from coordinator.adapters.generator import AdaptedGenerator
from coordinator.generation import GenerationRequest, Generator
from coordinator.requests.running import RunningRequest
from pdserve.protocol import Prompt, SamplingParams, Slo, TokenEvent
from pdserve.shared.errors import PdserveError
from tests.fakes.members import listen
from tests.lives.coordinator import CoordinatorProcess
from tests.lives.kv import POISON
from tests.lives.trace import Trace

ENDLESS = 150  # tokens
CLASSES = [
    Slo(),
    Slo(),
    Slo(name="batch", tenant="a"),
    Slo(name="interactive", priority=2, ttft_s=5.0, tpot_s=0.5),
    Slo(name="standard", priority=1, ttft_s=20.0, tpot_s=1.0, hold_s=2.0, tenant="a"),
    Slo(name="first", priority=1, ttft_s=10.0),
]


@dataclass
class Told:
    """One answer's client."""

    request: GenerationRequest
    running: RunningRequest | None = None
    events: list[TokenEvent] = field(default_factory=list)
    error: PdserveError | None = None
    num_ends: int = 0
    was_cancelled: bool = False
    started_s: float = 0.0
    ended_s: float = 0.0
    cancels_after: int = -1  # tokens; -1: never
    adapter: str = ""  # the digest of what the call's name stood for when it began

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        return [token for event in self.events for token in event.token_ids]


@dataclass
class Call:
    """One or several answers to a prompt, that are asked for at some time."""

    at_s: float
    answers: list[Told]
    cancelled_s: float = -1.0  # after the start; negative: never
    name: str = ""  # of an adapter
    refused: PdserveError | None = None

    def start(self, coordinator: CoordinatorProcess, trace: Trace) -> None:
        """Ask; runs in the coordinator."""
        loop = asyncio.get_running_loop()
        requests = [told.request for told in self.answers]
        names = [request.request_id for request in requests]
        generator: Generator = coordinator.flow
        try:
            if self.name:
                version = coordinator.adapters.find(self.name)
                if version is None:
                    raise not_found(self.name)
                generator = AdaptedGenerator(generator, version, coordinator.adapters.begin)
                for told in self.answers:
                    told.adapter = version.digest
            started = generator.start_siblings(requests)
        except PdserveError as error:
            trace.note("client", names, "refused", error.code)
            self.refused = error
            return
        trace.note("client", names, "started", len(requests[0].prompt.token_ids), "prompt tokens")
        for told, running in zip(self.answers, started, strict=True):
            assert isinstance(running, RunningRequest)
            told.running, told.started_s = running, loop.time()
            listen(running, _Listener(told, trace))
        if self.cancelled_s >= 0:
            loop.call_later(self.cancelled_s, self._cancel, trace)

    @property
    def is_over(self) -> bool:
        """Whether all of its answers have ended."""
        return self.refused is not None or all(told.num_ends for told in self.answers)

    def _cancel(self, trace: Trace) -> None:
        for told in self.answers:
            cancel(told, trace)


def cancel(told: Told, trace: Trace) -> None:
    """The client leaves."""
    if told.running is not None and not told.num_ends:
        trace.note("client", told.request.request_id, "cancels")
        told.was_cancelled = True
        told.running.cancel("the client left")


class _Listener:
    def __init__(self, told: Told, trace: Trace) -> None:
        self._told = told
        self._trace = trace

    def __call__(self, event: TokenEvent | Exception) -> None:
        told = self._told
        told.ended_s = asyncio.get_running_loop().time()
        if isinstance(event, TokenEvent):
            told.events.append(event)
            told.num_ends += event.finish_reason is not None
            if event.finish_reason is not None:
                self._trace.note("client", told.request.request_id, "has all", len(told.tokens))
            elif len(told.tokens) == told.cancels_after:  # not now: it is being told
                asyncio.get_running_loop().call_soon(cancel, told, self._trace)
            return
        assert isinstance(event, PdserveError), event
        told.num_ends += 1
        told.error = event
        self._trace.note("client", told.request.request_id, "is told", event.code, event)


def random_call(random: Random, number: int, at_s: float, shared: list[list[int]]) -> Call:
    """Some request or other."""
    prompt = list(random.choice(shared)) if random.random() < 0.5 else []
    prompt += [random.randrange(POISON) for _ in range(random.choice([1, 3, 9, 17, 40]))]
    is_endless = random.random() < 0.15  # as far as its client is concerned, who leaves
    max_tokens = ENDLESS if is_endless else random.choice([0, 1, 2, 5, 12, 30, 60, 60])
    stops = [random.randrange(1, POISON)] if random.random() < 0.2 else []
    sampling = SamplingParams(
        temperature=random.choice([0.0, 1.0]),
        max_tokens=max_tokens,
        min_tokens=random.choice([0, 0, min(max_tokens, 8)]),
        ignore_eos=is_endless or random.random() < 0.5,
        stop_token_ids=[] if is_endless else stops,
        logprobs=random.choice([None, None, 0]),
    )
    slo = random.choice(CLASSES)
    salt = random.choice(["", "", "salt"])
    deadline_s = random.choice([0.0, 0.0, 0.0, 30.0, 3.0])
    num_answers = random.choice([1, 1, 1, 2, 3]) if max_tokens else 1
    answers = [
        Told(
            GenerationRequest(
                request_id=f"r{number}" + (f".{i}" if i else ""),
                prompt=Prompt(prompt, salt),
                sampling=replace(sampling, seed=random.randrange(1 << 32)),
                slo=slo,
                deadline_s=deadline_s,
                wait_s=60.0,  # longer than any node stays away: no call is refused for that
            )
        )
        for i in range(num_answers)
    ]
    luck = random.random()
    if luck < 0.1:
        random.choice(answers).cancels_after = random.randrange(1, 8)
    leaves = is_endless or luck > 0.9
    return Call(at_s, answers, random.choice([0.0, 0.02, 0.1, 0.5, 1.0]) if leaves else -1.0)
