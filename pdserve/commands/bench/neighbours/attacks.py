"""The attacks: each is a call that is made again and again, so many of them at a time.

They are what a reading of the coordinator as its enemy has found, and what each of its bounds is
for (docs/LIMITS.md). A number makes each call another one: nothing is in a cache.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdserve.commands.bench.neighbours.calls import Attacker
from pdserve.commands.bench.neighbours.generated import generated

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_MOST_ENTRIES: Final = 1 << 18  # of log-probabilities in a call: as the coordinator allows
_TOP: Final = 20

Call = Callable[[Attacker, int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Attack:
    """One way to hurt a neighbour."""

    text: str  # what it does, for the table
    call: Call
    width: int  # calls at a time
    has_key: bool = True


def _completion(attacker: Attacker, number: int, **fields: Any) -> dict[str, Any]:
    prompt = attacker.ids(16, number)
    return attacker.terms(number) | {"prompt": prompt, "ignore_eos": True} | fields


async def _frames(attacker: Attacker, number: int) -> None:
    message = f'{{"type": "response.create", "x": "{number}{"a" * (2 << 20)}"}}'
    await attacker.frames([message] * 30)


async def _small_frames(attacker: Attacker, number: int) -> None:
    await attacker.frames([f'{{"type": "{number}"}}'] * 4096)


async def _logprobs(attacker: Attacker, number: int) -> None:
    tokens = attacker.max_model_len - 16
    answers = max(1, min(128, _MOST_ENTRIES // ((_TOP + 1) * tokens)))
    body = _completion(attacker, number, n=answers, max_tokens=tokens, logprobs=_TOP)
    await attacker.post(_COMPLETIONS, body)


async def _long_texts(attacker: Attacker, number: int) -> None:
    text = f"{number} " + "the quick brown fox " * 32_600
    await attacker.post(_COMPLETIONS, {"model": attacker.model, "prompt": text})


async def _tokenize(attacker: Attacker, number: int) -> None:
    text = f"{number} " + "a b" * 2_600
    await attacker.post("/tokenize", {"model": attacker.model, "prompt": text})


async def _many_ids(attacker: Attacker, number: int) -> None:
    await attacker.post(_COMPLETIONS, {"model": attacker.model, "prompt": [7] * 1_000_000})


async def _messages(attacker: Attacker, number: int) -> None:
    messages = [{"role": "user", "content": f"{number} {i}"} for i in range(4096)]
    await attacker.post(_CHAT, {"model": attacker.model, "messages": messages, "max_tokens": 1})


async def _unfinished(attacker: Attacker, number: int) -> None:
    key = attacker.session.headers["Authorization"].removeprefix("Bearer ")
    await attacker.unfinished(1 << 20, 16 << 20, key)


async def _leavers(attacker: Attacker, number: int) -> None:
    prompt = attacker.ids(attacker.max_model_len - 64, number)
    body = _completion(attacker, number, prompt=prompt, max_tokens=32, stream=True)
    await attacker.leave(_COMPLETIONS, body, 0.01)


async def _sampling(attacker: Attacker, number: int) -> None:
    ids = range(20, 20 + 200)
    body = _completion(
        attacker, number, n=16, max_tokens=200, stream=True, temperature=1.5, top_k=50, top_p=0.9,
        min_p=0.01, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5,
        logit_bias={str(token): 1.0 for token in ids},
        bad_words=[f"never {i}" for i in range(128)],
        stop=["never said", "nor this", "nor that", "nothing"],
    )  # fmt: skip
    await attacker.post(_COMPLETIONS, body)


async def _echoes(attacker: Attacker, number: int) -> None:
    prompt = attacker.ids(attacker.max_model_len - 8, number)
    body = _completion(attacker, number, prompt=prompt, echo=True, logprobs=5, n=4, max_tokens=1)
    await attacker.post(_COMPLETIONS, body)


async def _grammars(attacker: Attacker, number: int) -> None:
    names = {f"k{number}_{i}": {"type": "string", "pattern": f"(a|b){{1,{i}}}"} for i in range(16)}
    schema = {"type": "object", "properties": names, "required": list(names)}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    await attacker.post(
        _CHAT,
        {
            "model": attacker.model, "messages": [{"role": "user", "content": str(number)}],
            "response_format": form, "max_tokens": 100,
        },
    )  # fmt: skip


async def _connections(attacker: Attacker, number: int) -> None:
    await attacker.hold()


async def _flood(attacker: Attacker, number: int) -> None:
    tokens = attacker.max_model_len - 64
    await attacker.post(_COMPLETIONS, _completion(attacker, number, n=128, max_tokens=tokens))


async def _prompts(attacker: Attacker, number: int) -> None:
    prompt = attacker.ids(attacker.max_model_len - 8, number)
    await attacker.post(_COMPLETIONS, _completion(attacker, number, prompt=prompt, max_tokens=1))


async def _priorities(attacker: Attacker, number: int) -> None:
    body = _completion(attacker, number, priority=number % 256 - 128, max_tokens=64, stream=True)
    await attacker.post(_COMPLETIONS, body)


async def _embeddings(attacker: Attacker, number: int) -> None:
    inputs = [attacker.ids(200, number * 64 + i) for i in range(64)]
    await attacker.post("/v1/embeddings", {"model": attacker.model, "input": inputs})


async def _stored(attacker: Attacker, number: int) -> None:
    text = f"{number} " + "word " * 200
    await attacker.post(
        "/v1/responses",
        {"model": attacker.model, "input": text, "max_output_tokens": 16, "store": True},
    )


async def _batches(attacker: Attacker, number: int) -> None:
    bodies = (
        _completion(attacker, number, prompt=attacker.ids(256, number * 512 + i), max_tokens=64)
        for i in range(512)
    )
    await attacker.batch(_COMPLETIONS, bodies)


async def _files(attacker: Attacker, number: int) -> None:
    await attacker.file(f"{number}".encode() + b" " * (32 << 20))


async def _message_batches(attacker: Attacker, number: int) -> None:
    message = {"role": "user", "content": "Hi"}
    params = {"model": attacker.model, "max_tokens": 1, "messages": [message]}
    requests = [{"custom_id": f"{number}-{i}", "params": params} for i in range(8_000)]
    await attacker.post("/v1/messages/batches", {"requests": requests})


async def _pairs(attacker: Attacker, number: int) -> None:
    documents = [f"{number} {i} the quick brown fox" for i in range(2048)]
    body = {"model": attacker.model, "query": "What?", "documents": documents}
    await attacker.post("/v1/rerank", body)


async def _counts(attacker: Attacker, number: int) -> None:
    message = {"role": "user", "content": f"{number} " + "the quick brown fox " * 500_000}
    body = {"model": attacker.model, "messages": [message]}
    await attacker.post("/v1/messages/count_tokens", body)


async def _tools(attacker: Attacker, number: int) -> None:
    of = {f"k{i}": {"type": "string", "pattern": f"(a|b){{1,{i + 50}}}"} for i in range(8)}
    schema = {"type": "object", "properties": of, "required": list(of)}
    tools = [{"name": f"t{number}_{i}", "strict": True, "input_schema": schema} for i in range(3)]
    message = {"role": "user", "content": "Hi"}
    body = {"model": attacker.model, "messages": [message], "max_tokens": 64, "tools": tools}
    await attacker.post("/v1/messages", body | {"tool_choice": {"type": "any"}})


async def _metrics(attacker: Attacker, number: int) -> None:
    await attacker.get("/metrics")


ATTACKS: Final[Mapping[str, Attack]] = {
    "frames": Attack("WebSocket messages of 2 MiB that compress well", _frames, 2),
    "small-frames": Attack("thousands of WebSocket messages of nothing", _small_frames, 2),
    "logprobs": Attack("as many log-probabilities as a call may ask for", _logprobs, 2),
    "long-texts": Attack("prompts of 652 kB", _long_texts, 16),
    "tokenize": Attack("texts that just fit, to /tokenize", _tokenize, 8),
    "many-ids": Attack("prompts of a million token ids", _many_ids, 2),
    "messages": Attack("chats of 4096 messages", _messages, 4),
    "unfinished": Attack("bodies of 16 MiB that never end", _unfinished, 60),
    "leavers": Attack("long prompts whose clients leave at once", _leavers, 8),
    "sampling": Attack("all that makes a sampled token costly", _sampling, 4),
    "echoes": Attack("echoes of prompts, scored, four times", _echoes, 2),
    "grammars": Attack("grammars that are large, and never the same", _grammars, 4),
    "connections": Attack("connections that say nothing", _connections, 512, has_key=False),
    "flood": Attack("128 long answers a call", _flood, 2),
    "prompts": Attack("prompts that fill the context", _prompts, 8),
    "priorities": Attack("every priority that there is", _priorities, 16),
    "embeddings": Attack("embeddings of 64 texts a call", _embeddings, 4),
    "stored": Attack("responses to be stored", _stored, 8),
    "batches": Attack("batches of 512 calls, which nobody waits for", _batches, 2),
    "files": Attack("files of 32 MiB, stored and deleted", _files, 2),
    "message-batches": Attack("batches of 8000 messages each", _message_batches, 2),
    "pairs": Attack("2048 documents to rank", _pairs, 2),
    "counts": Attack("10 MB of text to count", _counts, 4),
    "tools": Attack("strict tools, never the same", _tools, 4),
    "metrics": Attack("scrapes, without a key", _metrics, 4, has_key=False),
    "generated": Attack("calls drawn at random", generated, 12),
}


async def well_behaved(attacker: Attacker, number: int) -> None:
    """What an ordinary tenant asks for; with `WELL_BEHAVED` calls at a time, no less than it gets.

    The yardstick: attacks must not be felt more than this.
    """
    prompt = attacker.ids(256, number)
    body = _completion(attacker, number, prompt=prompt, max_tokens=64, stream=True)
    await attacker.post(_COMPLETIONS, body)


WELL_BEHAVED: Final = 128
