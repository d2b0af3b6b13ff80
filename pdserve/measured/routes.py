"""Whether to ask a cascade's first tier: a classifier of prompts, and what it learns from.

It is a logistic model of n-grams of the prompt's tokens, hashed into slots, and of its length: a
few additions for each token, without any library but numpy. `pdserve route` fits it, and the
coordinator runs it before anything is asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from pdserve.shared.errors import ConfigError

VERSION: Final = 1
NUM_SLOTS: Final = 2**14
MOST_TOKENS: Final = 256  # of a prompt that are looked at: the last ones
_LONGEST: Final = 3  # n-gram
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)  # odd: the upper bits of a product depend on all
_SHIFT: Final = np.uint64(64 - 14)
_Share = Annotated[float, Meta(ge=0, le=1)]

Slots: TypeAlias = npt.NDArray[np.int64]


class OutcomesHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file of outcomes."""

    format: Literal["pdserve outcomes 1"] = "pdserve outcomes 1"
    tiers: Annotated[list[str], Meta(min_length=2, max_length=2)]  # names, the cheaper one first


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Each further line: what became of a prompt, or would have."""

    prompt: Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(min_length=1)]  # token ids
    kept: bool = True  # the cascade's other rules keep the first tier's answer
    quality: Annotated[list[_Share], Meta(min_length=2, max_length=2)]  # of each tier's answer
    cost: Annotated[list[Annotated[float, Meta(ge=0)]], Meta(min_length=2, max_length=2)]

    @property
    def is_in_vain(self) -> bool:
        """Whether the first tier had better not be asked."""
        return not self.kept or self.quality[0] < self.quality[1]

    def quality_if(self, *, skips: bool) -> float:
        """Return the quality of the answer, with the first tier skipped or not."""
        return self.quality[0] if self.kept and not skips else self.quality[1]

    def cost_if(self, *, skips: bool) -> float:
        """Return what the answer costs, with the first tier skipped or not."""
        first, second = self.cost
        return second if skips else first + (0.0 if self.kept else second)


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """How a rule does on outcomes."""

    num: int
    skipped: _Share  # of the prompts, for which the first tier is not asked
    quality: float  # mean
    cost: float  # relative to the second tier alone


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """What was found on outcomes that were not fitted."""

    large: Judged  # the second tier alone
    cascade: Judged  # without a classifier
    classified: Judged
    curve: list[Judged]  # at rising thresholds


class RouteClassifier(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One file."""

    version: int = VERSION
    tiers: list[str]
    threshold: _Share  # of the probability; beyond it the first tier is skipped
    bias: float
    length_weight: float
    weights: bytes  # of each slot, little-endian float32
    digest: str  # SHA-256 of all above
    held_out: HeldOut

    @cached_property
    def _weights(self) -> npt.NDArray[np.float32]:
        return np.frombuffer(self.weights, "<f4")

    def probability(self, prompt: Sequence[int]) -> float:
        """Return how probable it is that the first tier would be asked in vain."""
        slots = slots_of(prompt)
        logit = self.bias + self.length_weight * length_of(prompt)
        logit += float(self._weights[slots].sum()) / math.sqrt(len(slots))
        return 1 / (1 + math.exp(-max(-30.0, min(30.0, logit))))

    def skips(self, prompt: Sequence[int]) -> bool:
        """Return whether the first tier is not to be asked."""
        return self.probability(prompt) > self.threshold


class _Versioned(msgspec.Struct):
    version: int


def digest_of(classifier: RouteClassifier) -> str:
    """Return what its `digest` has to be."""
    parts = (classifier.version, classifier.tiers, classifier.threshold, classifier.bias)
    head = msgspec.json.encode((*parts, classifier.length_weight))
    return sha256(head + classifier.weights).hexdigest()


def length_of(prompt: Sequence[int]) -> float:
    """Return the length of a prompt as it is weighted."""
    return math.log1p(len(prompt))


def slots_of(prompt: Sequence[int]) -> Slots:
    """Return the slots of a prompt's n-grams, each once, in order."""
    tokens = np.asarray(prompt[-MOST_TOKENS:], dtype=np.uint64) + np.uint64(1)
    found, mixed = [], np.zeros_like(tokens)
    for size in range(1, min(_LONGEST, len(tokens)) + 1):
        num = len(tokens) - size + 1
        mixed = (mixed[:num] ^ tokens[size - 1 :]) * _FACTOR
        mixed ^= mixed >> np.uint64(29)
        found.append(mixed * _FACTOR >> _SHIFT)
    return np.unique(np.concatenate(found)).astype(np.int64)


def read_classifier(path: Path) -> RouteClassifier:
    """Read a file. Raises ConfigError: it cannot be read, is damaged, or of another version."""
    try:
        text = path.read_bytes()
        version = msgspec.json.decode(text, type=_Versioned).version
        if version != VERSION:
            raise ConfigError(
                f"{path} is a classifier of version {version}, and this pdserve reads version "
                f"{VERSION}: make it anew with `pdserve route train`"
            )
        found = msgspec.json.decode(text, type=RouteClassifier)
    except OSError as error:
        raise ConfigError(f"cannot read the classifier {path}: {error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a classifier of `pdserve route`: {error}") from error
    if len(found.weights) != 4 * NUM_SLOTS or digest_of(found) != found.digest:
        raise ConfigError(f"{path} is damaged: make it anew with `pdserve route train`")
    return found


def write_classifier(classifier: RouteClassifier, path: Path) -> None:
    """Write a file, whole or not at all. Raises ConfigError."""
    whole = path.with_name(f".{path.name}.new")
    try:
        whole.write_bytes(msgspec.json.format(msgspec.json.encode(classifier), indent=1) + b"\n")
        whole.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def read_outcomes(path: Path) -> tuple[OutcomesHeader, list[Outcome]]:
    """Read a file of outcomes. Raises ConfigError, which names the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the outcomes {path}: {error}") from error
    header, *outcomes = _decoded(path, lines)
    if not outcomes:
        raise ConfigError(f"{path} has no outcomes: a header, and then a line for each prompt")
    return header, outcomes


def _decoded(path: Path, lines: Sequence[bytes]) -> Iterator[Any]:
    for number, line in enumerate(lines or [b""], 1):
        try:
            yield msgspec.json.decode(line, type=Outcome if number > 1 else OutcomesHeader)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: line {number} is no line of outcomes: {error}") from error
