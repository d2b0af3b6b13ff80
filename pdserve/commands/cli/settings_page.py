"""The page that documents every setting of the processes, made from the config structs.

It is docs/SETTINGS.md: `python -m pdserve.commands.cli.settings_page > docs/SETTINGS.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import groupby, starmap
from typing import Any, Final, get_args

from pdserve.commands.cli.show_config import ENVIRONMENT, toml_value
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.settings.config import CoordinatorConfig, NodeConfig
from pdserve.settings.described import Setting, settings_of
from pdserve.settings.struct import MOST_SECONDS, ConfigStruct, KvPort, Port

# `pdserve prefill` and `pdserve decode` have the same settings, since a node can change its role.
COMMANDS: Final[Mapping[str, type[ConfigStruct]]] = {
    "up": ClusterConfig,
    "coordinator": CoordinatorConfig,
    "nodes": NodeConfig,
}

_HEAD: Final = f"""\
# Settings

All settings, in tables by who reads them: *up* is `pdserve up`, *nodes* are `pdserve prefill` and
`pdserve decode`.

A setting is given in the TOML file of `--config`, or as `--set NAME=VALUE`, which overrides the
file. In the file, `engine.kv_memory` is `kv_memory` in the section `[engine]`. One in **bold** is a
flag, too (`--kv-memory`), at least of one of the commands. `pdserve config` prints what a command
would have, and where each setting comes from. No time is over {MOST_SECONDS:,.0f} seconds.

```sh
pdserve up --config cluster.toml --set timeouts.drain_s=60 --mode adaptive
pdserve config up --config cluster.toml --mode adaptive
```

| environment | what it does |
|---|---|
"""
_TABLE: Final = """
## {title}: {readers}

| name | type | default | what it does |
|---|---|---|---|
"""


def markdown() -> str:
    """The page."""
    text = _HEAD + "".join(f"| `{name}` | {does} |\n" for name, does in ENVIRONMENT.items())
    for (section, readers), rows in groupby(_rows(), _table_of):
        title = f"[{section}]" if section else "Outside of sections"
        text += _TABLE.format(title=title, readers=readers) + "".join(starmap(_row, rows))
    return text


def _table_of(row: tuple[Setting, list[str]]) -> tuple[str, str]:
    """Its section and who reads it."""
    setting, commands = row
    return setting.path[0] if len(setting.path) > 1 else "", ", ".join(commands)


def _rows() -> Iterator[tuple[Setting, list[str]]]:
    """Each setting with the commands that read it; twice if two commands read it differently."""
    rows: dict[str, tuple[Setting, list[str]]] = {}
    for command, struct in COMMANDS.items():
        for setting in settings_of(struct):
            key = repr((setting.name, setting.hint, setting.description, setting.default))
            rows.setdefault(key, (setting, []))[1].append(command)
    sections = [setting.path[:-1] for setting, _ in rows.values()]
    tables = list(dict.fromkeys(_table_of(row) for row in rows.values()))
    yield from sorted(
        rows.values(),
        key=lambda row: (sections.index(row[0].path[:-1]), tables.index(_table_of(row))),
    )


def _row(setting: Setting, commands: list[str]) -> str:
    is_flag = any(_is_flag(setting, name) for name in commands)
    cells = [
        f"**`{setting.name}`**" if is_flag else f"`{setting.name}`",
        _type(setting),
        f"{_default(setting.default)} {setting.unit}".strip(),
        setting.description.replace("<", "&lt;"),
    ]
    return f"| {' | '.join(cells)} |\n"


def _is_flag(setting: Setting, command: str) -> bool:
    groups = COMMANDS[command].flag_groups or {}
    return any(setting.flag in names for names in groups.values())


def _type(setting: Setting) -> str:
    if any(meta in setting.metas for port in (Port, KvPort) for meta in get_args(port)[1:]):
        return "port"
    kind = {bool: "boolean", int: "integer", float: "number"}.get(setting.kind, "text")
    if setting.choices:
        kind = ", ".join(f"`{choice}`" for choice in setting.choices)
    bounds = [
        f"{sign} {bound:g}"
        for meta in setting.metas
        for sign, bound in ((">", meta.gt), (">=", meta.ge), ("<", meta.lt), ("<=", meta.le))
        if bound not in (None, MOST_SECONDS)
    ]
    text = " ".join([kind, ", ".join(bounds)]).strip()
    return f"list of {text}" if setting.is_list else text


def _default(value: Any) -> str:
    return "" if value is None else f"`{toml_value(value)}`"


if __name__ == "__main__":
    sys.stdout.write(markdown())
