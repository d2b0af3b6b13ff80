"""What cascades cost and how well they answer, beside their large model alone and beside chance.

python examples/cascade/compare.py [questions of each kind [questions of each kind to fit]]

It starts `pdserve up --mode colocated --models examples/cascade/models.toml`, asks both models the
questions to fit, has `pdserve route train` fit a classifier to what came of them, and starts the
cluster again with a cascade that asks it. Then all answer questions that were not fitted.
"""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the demo model's questions are in the source tree

from tools.demo_model.probes import Probe, held_out_probes  # noqa: E402

PORT = 8321
START_S = 120.0
AT_A_TIME = 32  # questions
URL = f"http://127.0.0.1:{PORT}"
PDSERVE = (sys.executable, "-m", "pdserve")
KINDS = (
    "addition",
    "subtraction",
    "times table",
    "division",
    "word problem",
    "follow-up",
    "small talk",
    "beyond reach",
    "translation",
    "capitals",
)
SEED = 20  # of the questions; others were looked at when the thresholds were chosen
SEED_TO_FIT = 101
MIN_LOGPROB = -0.4  # below, an answer of `small` is not kept
ROUTED = """
[cascades.routed]
tiers = [
    { model = "small", escalate = { classifier = "route.json", min_logprob = %s } },
    { model = "large" },
]
"""


@dataclass
class Answer:
    """What became of a question."""

    is_right: bool
    model: str  # that has answered
    prompt: list[int]  # token ids
    num_tokens: int
    min_logprob: float


async def node_seconds(session: aiohttp.ClientSession) -> float:
    """Seconds that nodes have spent in steps of their models."""
    async with session.get(f"{URL}/status") as response:
        nodes = (await response.json())["nodes"]
    total = 0.0
    for node in nodes:
        async with session.get(f"http://{node['metrics_address']}/metrics") as response:
            lines = (await response.text()).splitlines()
        total += sum(float(x.split()[1]) for x in lines if x.startswith("pdserve_step_seconds_sum"))
    return total


async def ask(client: openai.AsyncOpenAI, probe: Probe, model: str, salt: str) -> Answer:
    """Ask one question."""
    messages: Any = [
        {"role": message.role, "content": message.text}
        for message in probe.conversation.messages[:-1]
    ]
    told = await client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        logprobs=True,
        extra_body={"cache_salt": salt, "return_token_ids": True},
    )
    (choice,) = told.choices
    scored = choice.logprobs.content if choice.logprobs and choice.logprobs.content else []
    return Answer(
        is_right=probe.is_right(choice.message.content or ""),
        model=told.model,
        prompt=told.model_dump()["prompt_token_ids"],
        num_tokens=len(scored),
        min_logprob=min((one.logprob for one in scored), default=0.0),
    )


async def ask_all(probes: list[Probe], models: list[str], salt: str) -> tuple[list[Answer], float]:
    """Return the answers to all questions, each asked of its model, and the node-seconds spent."""
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="-")
    async with client, aiohttp.ClientSession() as session:
        await ready(session)
        places = asyncio.Semaphore(AT_A_TIME)

        async def limited(probe: Probe, model: str) -> Answer:
            async with places:
                return await ask(client, probe, model, salt)

        begun_s = await node_seconds(session)
        answers = await asyncio.gather(*map(limited, probes, models))
        return answers, await node_seconds(session) - begun_s


async def ready(session: aiohttp.ClientSession) -> None:
    """Wait until the cluster answers."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                async with session.get(f"{URL}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass  # it does not listen yet
            await asyncio.sleep(0.2)


def questions(seed: int, num_each: int) -> list[Probe]:
    """Return so many of each kind."""
    return [probe for probe in held_out_probes(seed, num_each) if probe.skill in KINDS]


async def record(probes: list[Probe]) -> str:
    """Ask both models, and return what came of it, as `pdserve route train` reads it."""
    small, small_s = await ask_all(probes, ["small"] * len(probes), "fit")
    large, large_s = await ask_all(probes, ["large"] * len(probes), "fit")
    a_token_s = [
        seconds / sum(answer.num_tokens for answer in answers)
        for answers, seconds in ((small, small_s), (large, large_s))
    ]
    outcomes = [
        {
            "prompt": pair[0].prompt,
            "kept": pair[0].min_logprob >= MIN_LOGPROB,
            "quality": [float(answer.is_right) for answer in pair],
            "cost": [a.num_tokens * s for a, s in zip(pair, a_token_s, strict=True)],
        }
        for pair in zip(small, large, strict=True)
    ]
    header = {"format": "pdserve outcomes 1", "tiers": ["small", "large"]}
    return "\n".join(map(json.dumps, [header, *outcomes]))


async def compare(probes: list[Probe]) -> None:
    """Ask all questions four times, and print a line for each."""
    chance = random.Random(SEED)
    all_s = 0.0

    async def arm(name: str, models: list[str]) -> list[str]:
        nonlocal all_s
        answers, used_s = await ask_all(probes, models, name)
        all_s = all_s or used_s
        quality = sum(answer.is_right for answer in answers) / len(answers)
        by = [answer.model for answer in answers]
        share = by.count("large") / len(by)
        print(
            f"{name}: {quality:.1%} right, {share:.0%} by large, {used_s:.2f} s "
            f"({used_s / all_s:.0%})"
        )
        return by

    await arm("large", ["large"] * len(probes))
    await arm("cascade", ["auto"] * len(probes))
    by = await arm("routed", ["routed"] * len(probes))
    await arm("chance", chance.sample(by, len(by)))


@contextmanager
def running(models: Path) -> Iterator[None]:
    """Run a cluster of the models of a file."""
    words = [*PDSERVE, "up", "--mode", "colocated", "--threads", "1", "--models", str(models)]
    with subprocess.Popen([*words, f"--port={PORT}"], stdout=subprocess.DEVNULL) as up:
        try:
            yield
        finally:
            up.terminate()


def main() -> None:
    """Fit a classifier, and compare."""
    num_each, num_to_fit = [*map(int, sys.argv[1:3]), *(40, 200)[len(sys.argv[1:3]) :]]
    known = HERE / "models.toml"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outcomes, models = folder / "outcomes.jsonl", folder / "models.toml"
        fitted = questions(SEED_TO_FIT, num_to_fit)
        with running(known):
            outcomes.write_text(asyncio.run(record(fitted)))
        file = folder / "route.json"
        subprocess.run([*PDSERVE, "route", "train", outcomes, "--output", file], check=True)
        here = known.read_text().replace("../../", f"{HERE.parents[1]}/")
        models.write_text(here + ROUTED % MIN_LOGPROB)
        asked = {probe.conversation for probe in fitted}
        with running(models):
            probes = questions(SEED, num_each)
            asyncio.run(compare([one for one in probes if one.conversation not in asked]))


main()
