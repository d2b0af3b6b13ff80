"""Packages that are installed for a test: what `pip install` would leave, in a folder."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path


def install(project: Path, site: Path) -> Path:
    """Put a project's modules, and what its pyproject.toml says of them, into `site`."""
    about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    site.mkdir(parents=True, exist_ok=True)
    for module in project.glob("*.py"):
        (site / module.name).write_text(module.read_text())
    lines = []
    for group, names in about["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    info = site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("\n".join(lines))
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    )
    return site


def finds(site: Path) -> Callable[[], None]:
    """What a process calls to find the packages there; it can be sent to other processes."""
    return partial(_find, str(site))


def _find(site: str) -> None:
    sys.path.append(site)
