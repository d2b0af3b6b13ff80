"""What cascades cost and how well they answer, beside their large model alone and beside chance.

python examples/cascade/compare.py [questions of each kind [questions of each kind to fit]]

It starts `pdserve up --mode colocated --models examples/cascade/models.toml`, and asks both models
the questions to fit. Of what came of them it chooses how sure an answer has to be, and `pdserve
route train` fits a classifier. Then the cluster is started again with cascades that use these, and
all answer questions that were not fitted, in turns: a machine's speed changes from one minute to
the next.

An answer of the small model takes about half of the other's node-seconds (44 and 52 % were seen),
and of six questions it fails one. So whoever knew beforehand which ones would still need 52 to 59 %
of the large model's node-seconds, within a point of its quality, and whoever knew it with the whole
answer 56 to 64 %.
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

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the demo model's questions are in the source tree

from tools.demo_model.probes import Probe, held_out_probes  # noqa: E402

PORT = 8321
START_S = 120.0
AT_A_TIME = 32  # questions
ROUNDS = 3  # of each way to answer
WITHIN = 0.005  # of the large model's quality, on the questions to fit
URL = f"http://127.0.0.1:{PORT}"
PDSERVE = (sys.executable, "-m", "pdserve")
# The small model answers four of five. Of bare sums other than additions it is told nothing.
KINDS = (
    "addition",
    "word problem",
    "follow-up",
    "small talk",
    "beyond reach",
    "translation",
    "capitals",
)
SEED = 20  # of the questions
SEED_TO_FIT = 101
FITTED = """
[cascades.fitted]
tiers = [{ model = "small", escalate = { min_logprob = %s } }, { model = "large" }]
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


async def ask(
    session: aiohttp.ClientSession, probe: Probe, model: str, salt: str, *, logprobs: bool
) -> Answer:
    """Ask one question, without an SDK: its work would keep the nodes' processors busy."""
    body = {
        "model": model,
        "messages": [
            {"role": message.role, "content": message.text}
            for message in probe.conversation.messages[:-1]
        ],
        "temperature": 0,
        "logprobs": logprobs,
        "cache_salt": salt,
        "return_token_ids": True,
    }
    async with session.post(f"{URL}/v1/chat/completions", json=body) as response:
        told: dict[str, Any] = await response.json()
        response.raise_for_status()
    (choice,) = told["choices"]
    scored = (choice.get("logprobs") or {}).get("content") or []
    return Answer(
        is_right=probe.is_right(choice["message"]["content"] or ""),
        model=told["model"],
        prompt=told["prompt_token_ids"],
        num_tokens=told["usage"]["completion_tokens"],
        min_logprob=min((one["logprob"] for one in scored), default=0.0),
    )


async def ask_all(
    probes: list[Probe], models: list[str], salt: str, *, logprobs: bool = False
) -> tuple[list[Answer], float]:
    """Return the answers to all questions, each asked of its model, and the node-seconds spent."""
    async with aiohttp.ClientSession() as session:
        await ready(session)
        places = asyncio.Semaphore(AT_A_TIME)

        async def limited(probe: Probe, model: str) -> Answer:
            async with places:
                return await ask(session, probe, model, salt, logprobs=logprobs)

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


async def record(probes: list[Probe]) -> tuple[float, str]:
    """Ask both models; return how sure answers of the small one have to be, and the outcomes.

    The outcomes are as `pdserve route train` reads them.
    """
    small, small_s = await ask_all(probes, ["small"] * len(probes), "fit", logprobs=True)
    large, large_s = await ask_all(probes, ["large"] * len(probes), "fit", logprobs=True)
    a_token_s = [
        seconds / sum(answer.num_tokens for answer in answers)
        for answers, seconds in ((small, small_s), (large, large_s))
    ]
    least = least_sure(small, large)
    outcomes = [
        {
            "prompt": pair[0].prompt,
            "kept": pair[0].min_logprob >= least,
            "quality": [float(answer.is_right) for answer in pair],
            "cost": [a.num_tokens * s for a, s in zip(pair, a_token_s, strict=True)],
        }
        for pair in zip(small, large, strict=True)
    ]
    header = {"format": "pdserve outcomes 1", "tiers": ["small", "large"]}
    return least, "\n".join(map(json.dumps, [header, *outcomes]))


def least_sure(small: list[Answer], large: list[Answer]) -> float:
    """Return the lowest log-probability with which as good as no quality is lost."""
    pairs = sorted(zip(small, large, strict=True), key=lambda pair: -pair[0].min_logprob)
    least, lost, found = 0.0, 0, 0.0
    for ours, theirs in pairs:
        lost += theirs.is_right - ours.is_right
        least = ours.min_logprob
        if lost <= WITHIN * len(pairs):
            found = least
    return round(found - 0.0005, 3)


@dataclass
class Arm:
    """A way to answer, and what came of it so far."""

    num_right: int = 0
    num_large: int = 0
    num: int = 0
    seconds: float = 0.0  # of nodes

    def add(self, answers: list[Answer], seconds: float) -> None:
        """Count a round."""
        self.num_right += sum(answer.is_right for answer in answers)
        self.num_large += sum(answer.model == "large" for answer in answers)
        self.num += len(answers)
        self.seconds += seconds


async def compare(probes: list[Probe]) -> None:
    """Ask all questions in each way, and print a line for each."""
    chance = random.Random(SEED)
    ways = {"large": "large", "cascade": "fitted", "routed": "routed"}
    arms = {name: Arm() for name in (*ways, "chance")}
    for number in range(ROUNDS):
        by: list[str] = []
        for name, model in ways.items():
            answers, used_s = await ask_all(probes, [model] * len(probes), f"{name} {number}")
            arms[name].add(answers, used_s)
            if name == "cascade":
                by = [answer.model for answer in answers]
        models = chance.sample(by, len(by))
        arms["chance"].add(*await ask_all(probes, models, f"chance {number}"))
    for name, arm in arms.items():
        print(
            f"{name}: {arm.num_right / arm.num:.1%} right, {arm.num_large / arm.num:.0%} by large, "
            f"{arm.seconds:.2f} s ({arm.seconds / arms['large'].seconds:.0%})"
        )


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
    num_each, num_to_fit = [*map(int, sys.argv[1:3]), *(100, 200)[len(sys.argv[1:3]) :]]
    known = HERE / "models.toml"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outcomes, models = folder / "outcomes.jsonl", folder / "models.toml"
        fitted = questions(SEED_TO_FIT, num_to_fit)
        with running(known):
            least, recorded = asyncio.run(record(fitted))
        outcomes.write_text(recorded)
        print(f"answers of the small model are kept whose tokens all have {least} or more")
        file = folder / "route.json"
        subprocess.run([*PDSERVE, "route", "train", outcomes, "--output", file], check=True)
        here = known.read_text().replace("../../", f"{HERE.parents[1]}/")
        models.write_text(here + FITTED % (least, least))
        asked = {probe.conversation for probe in fitted}
        with running(models):
            probes = questions(SEED, num_each)
            asyncio.run(compare([one for one in probes if one.conversation not in asked]))


main()
