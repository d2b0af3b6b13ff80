"""What pdserve keeps between starts, and where. It can be deleted at any time, even while used."""

from __future__ import annotations

from pathlib import Path

from pdserve.commands.cli.doctor.component import Availability, Component
from pdserve.engine.native.packed_folder import packed_files
from pdserve.shared.process.user_cache import cache_folder

_MIB = 2**20


def cache_components() -> list[Component]:
    """The caches of packed weights and of profiles."""
    return [_weights(cache_folder("weights")), _profiles(cache_folder("profiles"))]


def _weights(folder: Path | None) -> Component:
    if folder is None:
        return _nowhere("packed weights", "starts that pack nothing, and one copy for all nodes")
    files = packed_files(folder)
    mib = sum(file.num_bytes for file in files) / _MIB
    return _kept("packed weights", f"{len(files)} files, {mib:.0f} MiB", folder)


def _profiles(folder: Path | None) -> Component:
    if folder is None:
        return _nowhere("profiles", "starts that measure nothing")
    return _kept("profiles", f"{len(list(folder.glob('*.json')))} files", folder)


def _kept(name: str, what: str, folder: Path) -> Component:
    detail = f"{what} in {folder}; remove them at any time"
    return Component(topic="caches", name=name, verdict=Availability.OK, detail=detail)


def _nowhere(name: str, needed_for: str) -> Component:
    return Component(
        topic="caches",
        name=name,
        verdict=Availability.ABSENT,
        detail="neither XDG_CACHE_HOME nor a home directory is known",
        needed_for=needed_for,
    )
