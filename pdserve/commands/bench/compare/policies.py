"""Policies as contestants: a mode with other policies than it has by itself.

Light to import: every `pdserve` command loads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from pdserve.settings.config import (
    DECODE_POLICIES,
    PREFILL_POLICIES,
    ROUTERS,
    Mode,
    PolicyConfig,
    RoutingConfig,
)
from pdserve.settings.values import check_router
from pdserve.shared.errors import ConfigError

_AND: Final = "+"
_KINDS: Final = {
    "prefill_policy": PREFILL_POLICIES,
    "decode_policy": DECODE_POLICIES,
    "router": ROUTERS,
}


@dataclass(frozen=True, slots=True)
class PolicyContestant:
    """One entry of `--policies`: names of policies, at most one of each kind."""

    name: str  # as it was given: "sjf-aging+round-robin"
    mode: Mode
    chosen: dict[str, str]  # setting |-> name

    @classmethod
    def parse(cls, text: str, mode: Mode) -> PolicyContestant:
        """Read an entry. Raises ConfigError."""
        chosen: dict[str, str] = {}
        for name in text.split(_AND):
            setting = _setting_of(name, text)
            if setting in chosen:
                raise ConfigError(
                    f"--policies {text}: {chosen[setting]} and {name} are both a "
                    f"{_KINDS[setting].what}; give one of them"
                )
            chosen[setting] = name
        try:
            check_router(chosen.get("router", ""), mode)
        except ValueError as error:
            raise ConfigError(f"--policies {text}: {error}") from error
        return cls(text, mode, chosen)

    def policy(self, before: PolicyConfig) -> PolicyConfig:
        """Return the nodes' policies."""
        own = {setting: name for setting, name in self.chosen.items() if setting != "router"}
        return replace(before, **own)

    def routing(self, before: RoutingConfig) -> RoutingConfig:
        """Return the coordinator's."""
        return replace(before, router=self.chosen.get("router", before.router))


def _setting_of(name: str, text: str) -> str:
    """Return the setting that this name is for. Raises ConfigError."""
    found = []
    for setting, kind in _KINDS.items():
        try:
            kind.check(name)
        except ValueError:
            continue
        found.append(setting)
    if not found:
        there = "; ".join(f"a {kind.what}: {', '.join(kind.built_in)}" for kind in _KINDS.values())
        raise ConfigError(
            f'--policies {text}: there is no policy "{name}". There are, besides installed ones, '
            f"{there}"
        )
    if len(found) > 1:
        kinds = " and ".join(_KINDS[setting].what for setting in found)
        raise ConfigError(f'--policies {text}: "{name}" is a {kinds}: rename one')
    return found[0]
