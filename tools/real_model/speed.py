"""Steps of pdserve beside those of llama.cpp: the same file and cores, in turns."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from pdserve.shared.errors import PdserveError
from tools.real_model.fetch import Unobtainable

PROMPT: Final = 512  # tokens of the prompt that is timed
CONTEXT: Final = 128  # tokens behind which streams go on
BATCHES: Final = (1, 16)
_ROUNDS: Final = 2
_STEPS: Final = 32  # of llama.cpp
_BUDGET_S: Final = 8
_LIMIT_S: Final = 600
BENCH: Final = (sys.executable, "-m", "pdserve", "bench")
_SCRIPT: Final = Path(__file__).with_name("llama_cpp.mjs")

Speeds = dict[str, float]  # what |-> tokens a second
PREFILL: Final = f"prefill of {PROMPT}"


class NotMeasured(PdserveError):
    """A measurement failed."""


def decode(batch: int) -> str:
    """The name of a decode step."""
    return f"decode, batch {batch}"


def in_turns(
    model: Path, binaries: Path | None, threads: Sequence[int], tell: Callable[[str], None]
) -> tuple[Speeds, Speeds]:
    """Return the best tokens a second of pdserve and, if it is there, of llama.cpp.

    Raises:
        NotMeasured: one of them failed.
    """
    ours: Speeds = {}
    theirs: Speeds = {}
    for number in range(_ROUNDS):
        for count in threads:
            tell(f"steps, round {number + 1} of {_ROUNDS}, {count} threads")
            _keep_best(ours, _pdserve(model, count))
            if binaries is not None:
                _keep_best(theirs, _llama_cpp(model, binaries, count))
    return ours, theirs


def llama_tokens(binaries: Path, model: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return llama.cpp's tokens of some texts, special ones included."""
    script = _SCRIPT.with_name("llama_tokens.mjs")
    found = json_of(["node", str(script), str(binaries), str(model), json.dumps(texts)])
    return [list(tokens) for tokens in found]


def served_tokens(url: str) -> Speeds:
    """Return tokens a second of a server, as clients see them."""
    report = json_of(
        [
            *(*BENCH, "serve", "--json", f"--url={url}", f"--concurrency={_listed(BATCHES)}"),
            *(f"--prompt-tokens={CONTEXT}", "--output-tokens=64", "--requests=16"),
        ]
    )
    return {f"{row['concurrency']}": row["output_tokens_per_s"] for row in report["rows"]}


def _keep_best(best: Speeds, found: Speeds) -> None:
    for name, speed in found.items():
        best[name] = max(speed, best.get(name, 0.0))


def _pdserve(model: Path, threads: int) -> Speeds:
    report = json_of(
        [
            *(*BENCH, "step", "--json", f"--shape={model}", f"--threads={threads}"),
            *(f"--batches={_listed(BATCHES)}", f"--contexts={CONTEXT}", f"--prompts={PROMPT}"),
            *(f"--budget-s={_BUDGET_S}", "--kv-memory=1GiB"),
        ]
    )
    return {
        PREFILL if row["phase"] == "prefill" else decode(row["batch"]): row["tokens_per_s"]
        for row in report["rows"]
    }


def _llama_cpp(model: Path, binaries: Path, threads: int) -> Speeds:
    numbers = (threads, PROMPT, CONTEXT, _listed(BATCHES), _STEPS)
    found = json_of(["node", *map(str, (_SCRIPT, binaries, model, *numbers))])
    speeds = {decode(size): size / median(found["decode_s"][str(size)]) for size in BATCHES}
    return {PREFILL: PROMPT / median(found["prompt_s"])} | speeds


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def json_of(argv: Sequence[str], limit_s: float = _LIMIT_S) -> Any:
    """Return the last line of a command's output, parsed.

    Raises:
        NotMeasured: it failed, or took longer than `limit_s`.
        Unobtainable: it cannot be run.
    """
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=limit_s)
        return json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "it said nothing").splitlines()[-1]
        raise NotMeasured(f"{' '.join(argv[:5])}: {last}") from error
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise NotMeasured(f"{' '.join(argv[:5])}: {error}") from error
    except OSError as error:
        raise Unobtainable(f"{argv[0]} cannot be run: {error.strerror}") from error
