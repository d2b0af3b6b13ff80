"""The conditions of a measurement: what is needed to repeat it, or to doubt it."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

import pdserve
from pdserve.commands.cli.doctor.machine import machine_components
from pdserve.commands.cli.doctor.software import builds_component, required_packages
from pdserve.settings.struct import ConfigStruct

_GIT_S = 5.0


def conditions(config: ConfigStruct) -> dict[str, object]:
    """Return settings, machine, load and versions. Call before anything is started."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": msgspec.to_builtins(config),
        "machine": {one.name: one.detail for one in machine_components()},
        "kernels": builds_component().detail,
        "load_average": os.getloadavg()[0],  # over a minute
        "python": platform.python_version(),
        "pdserve": pdserve.__version__,
        "revision": revision(Path(__file__)),
        "packages": {name: _version(name) for name in required_packages()},
    }


def revision(file: Path) -> str:
    """Return the commit of a file's source tree, "-dirty" if the tree was changed; empty if none.

    A repository that only surrounds the file, such as one with a virtual environment, is not its
    source tree.
    """
    if not _git(file.parent, "ls-files", "--error-unmatch", file.name):
        return ""
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=12")


def _git(folder: Path, *words: str) -> str:
    """Return what git prints; empty if it fails."""
    command = ["git", "-C", str(folder), *words]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
