"""Calls drawn at random from all that a call can ask for, large and small, sane or not."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdserve.commands.bench.neighbours.calls import Attacker


async def generated(attacker: Attacker, number: int) -> None:
    """Make a random call, the same for the same number; some leave before they have an answer."""
    rng = np.random.default_rng([20, number])
    path, body = _chat(attacker, rng) if rng.random() < 0.4 else _completion(attacker, rng)
    body |= _options(rng) | attacker.terms(number)
    if rng.random() < 0.3:
        await attacker.leave(path, body, float(rng.exponential(0.1)))
    else:
        await attacker.post(path, body)


def _log_uniform(rng: np.random.Generator, most: int) -> int:
    return int(most ** rng.random())


def _completion(attacker: Attacker, rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
    length = _log_uniform(rng, attacker.max_model_len)
    body: dict[str, Any] = {"prompt": attacker.ids(length, int(rng.integers(1 << 21)))}
    if rng.random() < 0.2:
        body["prompt"] = [body["prompt"][:64]] * _log_uniform(rng, 64)
    if rng.random() < 0.2:
        body |= {"echo": True, "logprobs": int(rng.integers(21))}
    return "/v1/completions", body


def _chat(attacker: Attacker, rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
    words = "why " * _log_uniform(rng, attacker.max_model_len // 2)
    count = _log_uniform(rng, 256)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": words[: 1 << 16]}] * count}
    if rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": int(rng.integers(21))}
    if rng.random() < 0.2:
        body["response_format"] = {"type": "json_object"}
    return "/v1/chat/completions", body


def _options(rng: np.random.Generator) -> dict[str, Any]:
    """Each option is there or not, so most calls combine several."""
    drawn: dict[str, Any] = {
        "n": _log_uniform(rng, 64),
        "max_tokens": _log_uniform(rng, 2048),
        "temperature": float(rng.random() * 2),
        "top_p": float(rng.random()),
        "seed": int(rng.integers(1 << 31)),
        "ignore_eos": True,
        "stream": True,
        "presence_penalty": float(rng.random()),
        "repetition_penalty": 1.0 + float(rng.random()),
        "stop": ["zzz"] * int(rng.integers(1, 5)),
        "bad_words": [f"word {i}" for i in range(_log_uniform(rng, 128))],
        "logit_bias": {str(token): -1.0 for token in range(_log_uniform(rng, 200))},
    }
    return {name: value for name, value in drawn.items() if rng.random() < 0.5}
