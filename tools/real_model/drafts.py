"""Drafts from text beside llama.cpp's: the same file, prompts and cores, one stream, in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from coordinator.text import Tokenizer
from pdserve.commands.bench.drafts.config import TextSet
from pdserve.commands.bench.drafts.texts import make_texts
from pdserve.engine.models.config import load_model_config
from pdserve.model_files.checkpoint import resolve_checkpoint
from tools.real_model.fetch import Unobtainable
from tools.real_model.speed import BENCH, NotMeasured, json_of

SETS: Final[tuple[TextSet, ...]] = ("summaries", "edits", "retrieval")
KINDS: Final = ("NONE", "NGRAM_SIMPLE", "NGRAM_MAP_K", "NGRAM_MAP_K4V", "NGRAM_MOD", "NGRAM_CACHE")
_TOKENS: Final = 128  # of each answer
_TEXTS: Final = 2  # of each set: llama.cpp takes a minute for each kind of its drafts
_LIMIT_S: Final = 900
_SCRIPT: Final = Path(__file__).with_name("llama_drafts.py")


@dataclass(frozen=True, slots=True)
class Drafted:
    """What came of one kind of drafts, of all sets together."""

    kind: str  # "": pdserve's
    tokens_per_s: float
    drafted: int = 0
    accepted: int = 0

    @property
    def right(self) -> float:
        """Share of the drafts that were right; 0 if there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True, slots=True)
class Beside:
    """Both, by the thread counts that are best for each; llama.cpp's by each of its kinds."""

    off: float  # tokens a second of pdserve without drafts
    ours: Drafted
    theirs: Sequence[Drafted]  # the fastest first

    @property
    def fastest(self) -> Drafted | None:
        """llama.cpp's fastest kind of drafts."""
        return next((one for one in self.theirs if one.drafted), None)


def drafts_in_turns(
    model: Path, library: Path | None, threads: Sequence[int], tell: Callable[[str], None]
) -> Beside:
    """Measure both.

    Args:
        model: the file.
        library: folder of llama.cpp's server; None: it is not measured.
        threads: counts to try.
        tell: what is being done.

    Raises:
        NotMeasured: one of them failed.
    """
    off, ours, theirs = 0.0, Drafted("", 0.0), dict[str, Drafted]()
    for count in threads:
        tell(f"drafts, {count} threads")
        plain, own = _pdserve(model, count)
        off, ours = max(off, plain), max(ours, own, key=_speed)
        for kind in KINDS if library is not None else ():
            assert library is not None, "there is one"
            found = _llama_cpp(library, model, kind, count)
            theirs[kind] = max(theirs.get(kind, found), found, key=_speed)
    return Beside(off, ours, sorted(theirs.values(), key=_speed, reverse=True))


def _speed(one: Drafted) -> float:
    return one.tokens_per_s


def prompts_of(model: Path) -> list[list[int]]:
    """Return the prompts that `bench drafts` has of these sets."""
    checkpoint = resolve_checkpoint(str(model))
    num_ids = load_model_config(checkpoint).vocab_size
    tokenizer = Tokenizer.from_checkpoint(checkpoint.path, num_ids)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    made = [make_texts(name, encode, num_ids, _TEXTS, _TOKENS) for name in SETS]
    return [text.prompt for texts in made for text in texts]


def _pdserve(model: Path, threads: int) -> tuple[float, Drafted]:
    report = json_of(
        [
            *(*BENCH, "drafts", "--json", f"--shape={model}", f"--threads={threads}"),
            *("--batches=1", f"--texts={','.join(SETS)}", f"--tokens={_TOKENS}"),
            *(f"--rounds={_TEXTS}", "--histories=1000", "--kv-memory=1GiB"),
        ],
        _LIMIT_S,
    )
    rows, number = report["rows"], len(SETS)
    off, on = (
        number / sum(1 / row[f"{way}_tokens_per_s"] for row in rows) for way in ("off", "on")
    )
    drafted, accepted = (sum(row[name] for row in rows) for name in ("drafted", "accepted"))
    return off, Drafted("", on, drafted, accepted)


def _llama_cpp(library: Path, model: Path, kind: str, threads: int) -> Drafted:
    argv = [sys.executable, str(_SCRIPT), str(model), kind, str(threads), str(_TOKENS)]
    try:
        done = subprocess.run(
            argv,
            input=json.dumps(prompts_of(model)),
            capture_output=True,
            text=True,
            check=True,
            timeout=_LIMIT_S,
            env={**os.environ, "PYTHONPATH": str(library)},
        )
        answers: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "it said nothing").splitlines()[-1]
        raise NotMeasured(f"llama.cpp's {kind}: {last}") from error
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise NotMeasured(f"llama.cpp's {kind}: {error}") from error
    except OSError as error:
        raise Unobtainable(f"{argv[0]} cannot be run: {error.strerror}") from error
    total = {name: sum(one[name] for one in answers) for name in answers[0]}
    speed = total["tokens"] / total["seconds"]
    return Drafted(kind, speed, total["drafted"], total["accepted"])
