"""Profiles on disk, so that only a node's first start on a machine measures.

One small JSON file for each key. Nodes that profile at the same time each write theirs, and the
last one stays; a file that cannot be read, or is about something else, is as good as none.
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

FORMAT = 2  # of the file, and of what its costs mean; 2: CPUs compute a step natively


class ProfileKey(msgspec.Struct, frozen=True, kw_only=True):
    """All that a profile depends on, as far as one can know."""

    model_id: str
    revision: str
    device: str  # the processor's or the GPU's name
    dtype: str
    threads: int
    attention: str  # the kernels
    software: str  # versions of what computes
    token_budget: int
    max_batch_size: int
    block_size: int
    longest: int  # tokens of a request that were tried
    format: int = FORMAT


class Profile(msgspec.Struct, frozen=True):
    """What was measured."""

    costs: StepCosts
    error: float  # of the costs, as far as what they were fitted to goes


class _File(msgspec.Struct, frozen=True):
    key: ProfileKey
    profile: Profile


def read_profile(folder: Path, key: ProfileKey) -> Profile | None:
    """What was measured under this key, if anything was."""
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
    """Keep it; a folder that cannot be written to is worth no more than a warning."""
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
