"""Runs it: `python -m tools.real_model`."""

from __future__ import annotations

import argparse
import asyncio
import heapq
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

import aiohttp

from pdserve.commands.bench.output import machine_and_date
from pdserve.commands.cli.conditions import conditions
from pdserve.settings.config import EngineConfig
from pdserve.shared.errors import PdserveError
from tools.real_model.comparison import TOLERANCE, Agreement, compare, perplexity, worst_of
from tools.real_model.drafts import drafts_in_turns
from tools.real_model.fetch import LLAMA, Unobtainable, gemma, llama_cpp, llama_server
from tools.real_model.reference import Gemma
from tools.real_model.section import Found, replaced, section_of
from tools.real_model.serving import KV_BYTES, MODES, Served, served
from tools.real_model.speed import in_turns, llama_tokens, served_tokens

ROOT: Final = Path(__file__).resolve().parents[2]
DOCUMENT: Final = ROOT / "docs" / "MEASUREMENTS.md"
# Prose on heaps that has been in the standard library for twenty years.
TEXT: Final = heapq.__about__
TEXT_NAME: Final = "`heapq.__about__`"
PROMPTS: Final = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5,",
    "Der schnelle braune Fuchs springt über den",
    "東京は日本の",
    "\U0001f600\U0001f600\U0001f600 <b>",
    TEXT[:2800],  # longer than the window
)
NUM_TOKENS: Final = 48  # of each answer


def say(text: str) -> None:
    """Show what is being done."""
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="make real", description=__doc__)
    parser.add_argument("--gemma", default="", metavar="FILE", help="do not fetch it")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "real", help="to fetch to")
    asked = parser.parse_args(argv)
    load = os.getloadavg()[0]
    try:
        asked.folder.mkdir(parents=True, exist_ok=True)
        model = gemma(asked.folder, asked.gemma)
        setup = machine_and_date(conditions(EngineConfig()))
        found = Found(setup, _versions(), load, TEXT_NAME)
        found.file_bytes, found.kv_bytes = model.stat().st_size, KV_BYTES
        asyncio.run(measure(found, model, asked.folder))
    except (PdserveError, aiohttp.ClientError, OSError, TimeoutError) as error:
        say(f"make real: error: {str(error) or type(error).__name__}")
        return 1
    section = section_of(found)
    DOCUMENT.write_text(replaced(DOCUMENT.read_text(), section))
    print(section)
    wrong = complaints(found)
    for complaint in wrong:
        say(f"make real: wrong: {complaint}")
    return 1 if wrong else 0


async def measure(found: Found, model: Path, folder: Path) -> None:
    """Compare first, and then measure."""
    binaries = server = None
    try:
        binaries, server = llama_cpp(folder), llama_server(folder)
    except Unobtainable as error:
        found.without_llama = str(error)
    with tempfile.TemporaryDirectory() as name:
        await _compare(found, model, binaries, Path(name) / "exact")
        await _measure_served(found, model, Path(name) / "fast")
    if found.is_quiet:  # else its times say nothing, and take long
        threads = range(1, len(os.sched_getaffinity(0)) + 1)
        found.ours, found.theirs = in_turns(model, binaries, threads, say)
        found.drafts = drafts_in_turns(model, server, threads, say)


def complaints(found: Found) -> list[str]:
    """What is computed wrongly."""
    wrong = [
        f"{mode}: {agreement}"
        for mode, agreement in found.agreements.items()
        if not agreement.is_good
    ]
    if found.text_worst > TOLERANCE:
        wrong.append(f"a log-probability of the text is {found.text_worst:.3f} off")
    return wrong


async def _compare(found: Found, model: Path, binaries: Path | None, cache: Path) -> None:
    reference = Gemma(model)
    for name, mode in MODES.items():
        say(f"{name}: comparing with transformers in float32")
        async with served(model, cache, ["--dtype=float32", f"--mode={mode}"]) as cluster:
            prompts = [await cluster.tokenize(text) for text in (*PROMPTS, TEXT)]
            if binaries is not None and prompts != llama_tokens(binaries, model, [*PROMPTS, TEXT]):
                raise PdserveError("the tokens of a text are not llama.cpp's")
            *prompts, text = prompts
            found.agreements[name] = await _answers(cluster, reference, prompts)
            logprobs = await cluster.scores(text)
        expected = reference.expected(text[:1], text[1:])
        found.text_worst = max(found.text_worst, worst_of(logprobs, expected))
        found.num_text, found.perplexities["pdserve"] = len(text), perplexity(logprobs)
        found.perplexities["transformers"] = perplexity([one.logprob for one in expected])


async def _answers(cluster: Served, reference: Gemma, prompts: list[list[int]]) -> Agreement:
    agreement = Agreement()
    answers = await asyncio.gather(*(cluster.complete(one, NUM_TOKENS) for one in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference.expected(prompt, answer.token_ids)
        agreement += compare(answer.token_ids, answer.logprobs, expected)
    return agreement


async def _measure_served(found: Found, model: Path, cache: Path) -> None:
    """Load it twice; the second time, it was packed before."""
    for start in ("first", "packed"):
        say(f"load to ready: {start}")
        async with served(model, cache, ["--mode=colocated"]) as cluster:
            found.ready_s[start] = cluster.ready_s
            if found.is_quiet and start == "packed":
                found.served = await asyncio.to_thread(served_tokens, cluster.url)
            found.node_memory = cluster.node_memory()  # packed before


def _versions() -> str:
    return f"transformers {version('transformers')}, llama.cpp of {LLAMA.lstrip('@')}"


if __name__ == "__main__":
    sys.exit(main())
