"""Checks everything that needs a GPU: `python -m tools.gpu_check --out FOLDER`.

Phases run one after the other, each with a time limit of its own; each leaves PHASE.json in the
folder at once, and later ones run whatever became of earlier ones. A machine without a GPU runs
them with tiny sizes, so that they work when there is one.

A GPU machine without a network needs the packages that it lacks: `--collect wheels` gets them where
there is one, and `--wheels wheels` makes an environment of them there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

from pdserve.commands.cluster.placement import GPU_SIGNS, count_gpus

ROOT: Final = Path(__file__).resolve().parents[2]
TAIL: Final = 20_000  # characters of the output that are kept
PRESENT: Final = {"torch", "triton", "numpy", "pip", "setuptools", "pdserve", "sympy", "networkx"}
NOT_NEEDED: Final = {  # by these phases: linters, clients, plots; it all has to be carried
    *("mypy", "mypy_extensions", "ruff", "import-linter", "grimp", "librt", "ast_serialize"),
    *("schemathesis", "jsonschema_rs", "hypothesis-graphql", "graphql-core", "grpcio-tools"),
    *("openai", "pydantic", "pydantic_core", "hf-xet", "nixl-cu13", "matplotlib", "pillow"),
    *("fonttools", "contourpy", "kiwisolver"),
}
BUILD: Final = ("scikit-build-core", "nanobind", "ninja")  # cmake is there


@dataclass(frozen=True)
class Phase:
    """One command, and what its output must not be."""

    name: str
    limit_s: float
    arguments: Sequence[str]  # of this Python
    complaint: Callable[[str], str] = lambda output: ""


def interpreted(output: str) -> str:
    """Why tests that passed have not run on the GPU; empty if they have."""
    if "needs an NVIDIA GPU" in output:
        return "torch finds no GPU, so its tests were skipped"
    return "" if " passed" in output else "no test has run"


def phases(*, has_gpu: bool, num_gpus: int = 1) -> list[Phase]:
    """All phases; without a GPU, in sizes that take seconds, and ranks are on CPUs."""
    shape = "8b" if has_gpu else "demo-14m"
    engine = ["--dtype=bfloat16", "--token-budget=8192", "--max-batch-size=256"]
    grid = ["--batches=1,16,64,256", "--contexts=1024,8192", "--prompts=512,2048,8192"]
    if not has_gpu:
        engine = ["--threads=1", "--kv-memory=64MiB"]
        grid = ["--batches=1", "--contexts=128", "--prompts=128", "--budget-s=1"]
    few = ["--requests=64"] if has_gpu else ["--requests=4", "--concurrency=2", "--output-tokens=4"]
    streams = "16,64,256" if has_gpu else "1"
    tokens = [] if has_gpu else ["--prompt-tokens=16", "--output-tokens=4", "--requests=2"]
    flags = " ".join(engine[1:])
    step = ["-m", "pdserve", "bench", "step", "--json", f"--shape={shape}", *grid, *engine]
    bench = ["-m", "pdserve", "bench"]
    return [
        Phase("doctor", 120, ["-m", "pdserve", "doctor", "--json"]),
        Phase(
            "tests",
            300,
            ["-m", "pytest", "-q", "-n0", "-rs", "-Wdefault", "-pno:cacheprovider", "tests/gpu"],
            interpreted if has_gpu else lambda output: "",
        ),
        Phase("step", 420, step),
        *(
            Phase(f"step-{name}", 240, [*step, f"--attention={name}", *only])
            for name, only in (("triton", ["--quick"]), ("reference", ["--quick"]))
            if has_gpu
        ),
        *(
            Phase(f"step-{name}", 180, [*step, "--quick", f"--quantization={name}"])
            for name in ("int8", "int4", "fp8")
            if has_gpu
        ),
        Phase("step-launched", 240, [*step, "--quick", "--no-cuda-graphs"])
        if has_gpu
        else Phase("step-float32", 60, [*step, "--dtype=float32"]),
        *(
            [Phase("step-ranks", 240, [*step, "--tensor-parallel=2", *["--quick"][:has_gpu]])]
            if num_gpus > 1 or not has_gpu
            else []
        ),
        Phase(
            "transfer",
            240,
            [*bench, "transfer", "--json", "--networks=loopback"]
            + (
                [f"--devices=cuda:0,cuda:{min(num_gpus, 2) - 1}"]
                if has_gpu
                else ["--quick", "--block-kib=64", "--blocks=1", "--transports=shm"]
            ),
        ),
        Phase("handoff", 240, [*bench, "handoff", "--json", *few]),
        Phase(
            "serve",
            540,
            [*bench, "serve", "--json", f"--shape={shape}", f"--concurrency={streams}", *tokens]
            + [
                f"--against=pdserve={mode} {flags}"
                for mode in ("--mode=colocated", "--prefill=1 --decode=1")[: 2 if has_gpu else 1]
            ],
        ),
    ]


def run_phase(phase: Phase, python: str, out: Path) -> str:
    """Run one phase, write what came of it, and return what is wrong; empty if nothing is."""
    began_s = time.monotonic()
    process = subprocess.Popen(
        [python, *phase.arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=phase.limit_s)
        wrong = f"exit code {process.returncode}" if process.returncode else phase.complaint(output)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        wrong = f"not done within {phase.limit_s:g} s"
    found: dict[str, Any] = {
        "phase": phase.name,
        "command": ["python", *phase.arguments],
        "wrong": wrong,
        "seconds": round(time.monotonic() - began_s, 1),
        "report": json_in(output),
        "output": output[-TAIL:],
    }
    (out / f"{phase.name}.json").write_text(json.dumps(found, indent=1))
    print(f"{phase.name}: {wrong or 'well'} ({found['seconds']} s)", flush=True)
    return wrong


def json_in(output: str) -> Any:
    """The JSON value that a command printed among other lines; None if there is none."""
    decoder = json.JSONDecoder()
    for start, character in enumerate(output):
        if character in "{[" and (start == 0 or output[start - 1] == "\n"):
            try:
                return decoder.raw_decode(output, start)[0]
            except ValueError:
                continue
    return None


def collect(wheels: Path) -> None:
    """Download what the machine with the GPU lacks: all that is installed here and not there."""
    names = [
        f"{each.name}=={each.version}"
        for each in distributions()
        if each.name not in PRESENT | NOT_NEEDED
    ]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"-d{wheels}"]
    subprocess.run([*pip, *sorted(names), *BUILD], check=True, timeout=600)


def install(wheels: Path, folder: Path) -> str:
    """Make an environment of these wheels over the machine's own packages; returns its Python."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--system-site-packages", folder], check=True, timeout=60
    )
    python = str(folder / "bin" / "python")
    offline = [python, "-m", "pip", "install", "-q", "--no-index", f"--find-links={wheels}"]
    files = sorted(map(str, wheels.glob("*.whl")))
    subprocess.run([*offline, "--no-deps", *files], check=True, timeout=300)
    own = [*offline, "--no-deps", "--no-build-isolation", "-e", str(ROOT)]
    subprocess.run(own, check=True, timeout=300)
    return python


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-check"), help="folder for the results"
    )
    parser.add_argument("--collect", type=Path, metavar="WHEELS", help="only download packages")
    parser.add_argument("--wheels", type=Path, help="install from these first")
    parser.add_argument("--only", default="", help="phases, by name, with commas")
    asked = parser.parse_args()
    if asked.collect is not None:
        collect(asked.collect)
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    python = sys.executable
    if asked.wheels is not None:
        python = install(asked.wheels, asked.out / "environment")
    wanted = [name for name in asked.only.split(",") if name]
    chosen = [
        phase
        for phase in phases(
            has_gpu=any(sign.exists() for sign in GPU_SIGNS), num_gpus=max(1, count_gpus())
        )
        if not wanted or phase.name in wanted
    ]
    wrong = [phase.name for phase in chosen if run_phase(phase, python, asked.out)]
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} phases went well, see {asked.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
