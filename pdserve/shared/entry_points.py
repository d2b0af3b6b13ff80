"""Policies of other installed packages, found by name through their entry points.

    [project.entry-points."pdserve.routers"]       # in the package's pyproject.toml
    stickiest = "my_routers:Stickiest"

Then `router = "stickiest"` is a choice like those in the tree. What the name stands for is called
with the same arguments as ours; `PolicyKind.make` says which package is at fault if that fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import TypeVar

from pdserve.shared.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class PolicyKind:
    """Something that is chosen by name, among our own and installed ones."""

    what: str  # for people: "router"
    group: str  # of the entry points
    built_in: tuple[str, ...]

    def check(self, name: str) -> None:
        """Raise ValueError, which becomes a ConfigError in a config, if there is none."""
        if name not in self.built_in:
            self._find(name)

    def make(self, interface: type[T], name: str, *arguments: object) -> T:
        """Call the installed one with these arguments.

        Raises:
            ConfigError: it cannot be loaded or called, or is no `interface`; names its package.
        """
        found = self._find(name)
        try:
            made = found.load()(*arguments)
        except Exception as error:
            raise ConfigError(f"{self._told(found)} fails: {error!r}") from error
        if not isinstance(made, interface):
            raise ConfigError(
                f"{self._told(found)} makes a {type(made).__name__}, which has not all methods of "
                f"{interface.__module__}.{interface.__name__}"
            )
        return made

    def _find(self, name: str) -> metadata.EntryPoint:
        installed = metadata.entry_points(group=self.group)
        found = [each for each in installed if each.name == name]
        if not found:
            there = ", ".join([*self.built_in, *sorted(set(installed.names))])
            raise ValueError(f"there is no {self.what} {name!r}; there are {there}")
        if len({each.value for each in found}) > 1:
            packages = " and ".join(sorted(_package(each) for each in found))
            raise ValueError(f"there are several {self.what}s {name!r}, of {packages}: remove one")
        return found[0]

    def _told(self, found: metadata.EntryPoint) -> str:
        return f"the {self.what} {found.name!r} of the package {_package(found)} ({found.value})"


def _package(found: metadata.EntryPoint) -> str:
    return f"{found.dist.name} {found.dist.version}" if found.dist else "without a name"
