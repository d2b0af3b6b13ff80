"""Eight models on shared nodes, asked by Zipf's law, while nodes die as they wake and sleep."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Final

import pytest

from pdserve.settings.config import ClusterMode
from tests.cluster.checkpoints import Reference, make_prompt, make_tiny_of
from tests.cluster.client import Client
from tests.cluster.fleet import START_S, Fleet, models_config, poll, running

SECONDS: Final = float(os.environ.get("PDSERVE_ZIPF_S", "20"))  # of each case
NAMES: Final = "abcdefgh"
STREAMS: Final = 6
TOKENS: Final = 16
ANSWER_S: Final = 120.0
# Mode and shared nodes, by name.
CASES: Final[dict[str, tuple[ClusterMode, str]]] = {
    "colocated": ("colocated", "decode = 2"),
    "disaggregated": ("disaggregated", "prefill = 2, decode = 2"),
    "adaptive": ("adaptive", "prefill = 2, decode = 2"),
    "flowing": ("flowing", "prefill = 2, decode = 2"),
    "multiplexed": ("multiplexed", "decode = 1"),
    "places": ("colocated", 'decode = 1, at_once = 2, memory = "16MiB"'),
    "places in pools": (
        "disaggregated",
        'prefill = 1, decode = 1, at_once = 2, memory = "16MiB"',
    ),
}
# What is written as a node sleeps and wakes; it is killed when it writes one of these.
MOMENTS: Final = ("is to become a node of", "is draining", "listens on", "weights in", "is ready")


def write_models(folder: Path, shared: str) -> dict[str, Path]:
    """Make the models and their file."""
    lines = [f"shared = {{ {shared} }}"]
    lines += [f'[models.{name}]\nsource = "of-{name}"\nmin = {{}}' for name in NAMES]
    (folder / "models.toml").write_text("\n".join(lines))
    return {n: make_tiny_of(folder / f"of-{n}", seed=seed) for seed, n in enumerate(NAMES)}


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 4 * ANSWER_S + START_S)
@pytest.mark.parametrize("case", CASES)
async def test_each_token_is_of_the_model_that_was_asked(case: str, tmp_path: Path) -> None:
    mode, shared = CASES[case]
    paths, random = write_models(tmp_path, shared), Random(43)
    prompts = [make_prompt(40 + 60 * number, seed=number) for number in range(3)]
    expected = {
        (name, number): reference.greedy(prompt, TOKENS)
        for name, reference in ((name, Reference(path)) for name, path in paths.items())
        for number, prompt in enumerate(prompts)
    }
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    engine = {"threads": 0} if mode == "multiplexed" else {}
    config = models_config(tmp_path, mode=mode, engine=engine)
    fleet = Fleet(config, restarts=True)
    answered, killed = Counter[str](), Counter[str]()
    over = asyncio.Event()
    async with running(fleet), Client(fleet.url, ANSWER_S) as client:

        async def ask() -> None:
            shares = [1 / rank for rank in range(1, len(NAMES) + 1)]
            while not over.is_set():
                name, number = random.choices(NAMES, shares)[0], random.randrange(len(prompts))
                send = random.choice((client.complete, client.stream_all))
                answer = await send(prompts[number], TOKENS, model=name)
                assert answer.error is None, (name, answer.status, answer.error)
                assert answer.tokens == expected[name, number], (name, number)
                answered[name] += 1

        async def kill() -> None:
            while not over.is_set():
                moment = random.choice(MOMENTS)
                victim = await _that_writes(fleet, moment, over)
                if victim is not None:
                    killed[moment] += 1
                    await fleet.kill_node(victim)
                    await fleet.start_node(victim)
                    with suppress(TimeoutError):  # some wakes are to succeed
                        await asyncio.wait_for(over.wait(), random.uniform(0.0, 4.0))

        async def enough() -> bool:  # also on a busy machine
            return killed.total() > 0 and all(answered[name] for name in NAMES[:3])

        async with asyncio.timeout(SECONDS + 3 * ANSWER_S), asyncio.TaskGroup() as tasks:
            for _ in range(STREAMS):
                tasks.create_task(ask())
            tasks.create_task(kill())
            await asyncio.sleep(SECONDS)
            await poll(enough, 2 * ANSWER_S, lambda: f"{answered} answered, killed: {killed}")
            over.set()
        await fleet.wait_back()
    sys.stderr.write(f"{case}: {dict(answered)} answered, killed: {dict(killed)}\n")


async def _that_writes(fleet: Fleet, moment: str, over: asyncio.Event) -> str | None:
    """Return the node of which such a line is written next; None: it is over."""
    seen, found = len(fleet.lines), list[str]()

    async def is_there() -> bool:
        nonlocal seen
        new, seen = fleet.lines[seen:], len(fleet.lines)
        found.extend(_nodes(new, moment, fleet.node_names))
        return bool(found) or over.is_set()

    await poll(is_there, SECONDS + 3 * ANSWER_S, lambda: f"nobody wrote {moment!r}")
    return found[0] if found else None


def _nodes(lines: Sequence[tuple[str, str]], moment: str, names: Sequence[str]) -> Iterator[str]:
    for process, line in lines:
        if moment in line:
            yield from [process] if process in names else [n for n in names if f"{n} is" in line]
