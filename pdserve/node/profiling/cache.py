"""Caches profiles on disk, so that only the first start of a node on a machine measures.

Models that differ in their weights alone have one, so that a wake as one of them need not measure.

There is one small JSON file per key. If several nodes profile at the same time, the last one's file
remains. A file that cannot be read, or that has another key, is ignored.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from itertools import pairwise
from pathlib import Path

import msgspec

from pdserve.protocol import StepCosts

log = logging.getLogger(__name__)

FORMAT = 3  # version of the file format and of the meaning of its costs


class ProfileKey(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known that a profile depends on."""

    model: str  # its shape and arithmetic, of which other weights make no other times
    device: str  # the processor's or the GPU's name
    dtype: str
    threads: int  # of a rank
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    attention: str  # name of the backend
    software: str  # versions of pdserve and torch
    token_budget: int
    max_batch_size: int
    block_size: int
    longest: int  # most tokens of a profiled request
    format: int = FORMAT


class Profile(msgspec.Struct, frozen=True):
    """A measured profile."""

    costs: StepCosts
    # Mean relative error of the costs: for the steps that they were fitted to, or for those in
    # service, if these have shown that it is larger.
    error: float


class _File(msgspec.Struct, frozen=True):
    key: ProfileKey
    profile: Profile


def read_profile(folder: Path, key: ProfileKey) -> Profile | None:
    """Read the profile with this key; None if there is none."""
    path = _path(folder, key)
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("profiling anew: cannot read %s: %s", path, error)
        return None
    if file.key != key or not _are_sound(file.profile.costs):
        log.warning("profiling anew: %s is about something else, or damaged", path)
        return None
    return file.profile


def write_profile(folder: Path, key: ProfileKey, profile: Profile) -> None:
    """Write a profile. If that fails, log a warning."""
    text = msgspec.json.format(msgspec.json.encode(_File(key, profile)))
    path = _path(folder, key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".new", delete=False) as new:
            new.write(text)
        Path(new.name).replace(path)
    except OSError as error:
        log.warning(
            "the profile will be measured again next time: cannot write %s: %s", path, error
        )


def doubt_profile(folder: Path, key: ProfileKey, profile: Profile, error: float) -> None:
    """Note that the costs of a kept profile have this error in service.

    Nothing happens if another node has replaced it meanwhile. A larger error makes the next start
    measure again, and prefer what it finds.
    """
    if error > profile.error and read_profile(folder, key) == profile:
        log.warning(
            "the machine was too busy when this node was profiled: steps take %.2f of what the "
            "profile says; the next start will measure again",
            1 / (1 + error),
        )
        write_profile(folder, key, Profile(profile.costs, error))


def _path(folder: Path, key: ProfileKey) -> Path:
    digest = hashlib.sha256(msgspec.json.encode(key)).hexdigest()
    return folder / f"{digest[:32]}.json"


def _are_sound(costs: StepCosts) -> bool:
    tokens, seconds = costs.knot_tokens, costs.knot_s
    numbers = [*seconds, costs.sampled_s, costs.pair_s, costs.context_s]
    return (
        0 < len(tokens) == len(seconds)
        and all(a < b for a, b in pairwise([0, *tokens]))
        and all(a <= b for a, b in pairwise(seconds))
        and all(0 <= number < float("inf") for number in numbers)
        and seconds[0] > 0
    )
