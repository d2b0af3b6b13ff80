"""What a cascade costs and how well it answers, beside its large model alone and beside chance.

python examples/cascade/compare.py [number of questions of each kind]

It starts `pdserve up --mode colocated --models examples/cascade/models.toml` itself.
"""

import asyncio
import random
import subprocess
import sys
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
COMMAND = ["up", "--mode", "colocated", "--threads", "1", "--models"]
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
SEED = 20  # of the questions; others were looked at when the threshold was chosen


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


async def ask(client: openai.AsyncOpenAI, probe: Probe, model: str, salt: str) -> tuple[bool, str]:
    """Return whether the answer is right, and which model has given it."""
    messages: Any = [
        {"role": message.role, "content": message.text}
        for message in probe.conversation.messages[:-1]
    ]
    answer = await client.chat.completions.create(
        model=model, messages=messages, temperature=0, extra_body={"cache_salt": salt}
    )
    return probe.is_right(answer.choices[0].message.content or ""), answer.model


async def compare(num_each: int) -> None:
    """Ask all questions three times, and print a line for each."""
    probes = [probe for probe in held_out_probes(SEED, num_each) if probe.skill in KINDS]
    chance = random.Random(SEED)
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="-")
    async with client, aiohttp.ClientSession() as session:
        await ready(session)

        places = asyncio.Semaphore(AT_A_TIME)

        async def limited(probe: Probe, model: str, salt: str) -> tuple[bool, str]:
            async with places:
                return await ask(client, probe, model, salt)

        async def arm(name: str, models: list[str]) -> tuple[float, list[str]]:
            begun_s = await node_seconds(session)
            asked = zip(probes, models, strict=True)
            answers = await asyncio.gather(*(limited(probe, model, name) for probe, model in asked))
            used_s = await node_seconds(session) - begun_s
            quality = sum(is_right for is_right, _ in answers) / len(answers)
            by = [model for _, model in answers]
            share = by.count("large") / len(by)
            cost = f" ({used_s / all_s:.0%})" if all_s else ""
            print(f"{name}: {quality:.1%} right, {share:.0%} by large, {used_s:.2f} s{cost}")
            return used_s, by

        all_s = 0.0
        all_s, _ = await arm("large", ["large"] * len(probes))
        _, by = await arm("cascade", ["auto"] * len(probes))
        await arm("chance", chance.sample(by, len(by)))


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


def main() -> None:
    """Compare, while a cluster runs."""
    words = [sys.executable, "-m", "pdserve", *COMMAND, str(HERE / "models.toml")]
    with subprocess.Popen([*words, f"--port={PORT}"], stdout=subprocess.DEVNULL) as up:
        try:
            asyncio.run(compare(int(sys.argv[1]) if len(sys.argv) > 1 else 40))
        finally:
            up.terminate()


main()
