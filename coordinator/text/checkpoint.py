"""Reads the chat templates of a checkpoint folder, without compiling them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pdserve.model_files.tokenizer import TokenizerConfig
from pdserve.shared.errors import TokenizerError

DEFAULT, TOOL_USE = "default", "tool_use"


def load_chat_templates(folder: Path, config: TokenizerConfig, instead: str = "") -> dict[str, str]:
    """Return name |-> source; with any, there is a default one. Files precede the config.

    `instead`: a file that replaces all of them; empty: none does. Raises TokenizerError.
    """
    if instead:
        return {DEFAULT: _text_of(Path(instead).expanduser())}
    named = dict(_configured(config.values.get("chat_template")))
    files = {DEFAULT: folder / "chat_template.jinja"}
    files |= {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    named |= {name: _text_of(path) for name, path in files.items() if path.is_file()}
    if named.keys() == {TOOL_USE}:
        return dict.fromkeys([DEFAULT], *named.values())
    if named and DEFAULT not in named:
        raise TokenizerError(
            f"{folder} names chat templates {sorted(named)}, but none is {DEFAULT!r}"
        )
    return named


def _configured(value: Any) -> Iterator[tuple[str, str]]:
    """Iterate over the templates of the config: one, a list of named ones, or a mapping."""
    if value is None:
        return
    entries: Iterable[Any] = [{"name": DEFAULT, "template": value}]
    if isinstance(value, dict):
        entries = [{"name": name, "template": source} for name, source in value.items()]
    elif isinstance(value, list):
        entries = value
    for entry in entries:
        match entry:
            case {"name": str() as name, "template": str() as source}:
                yield name, source
            case _:
                raise TokenizerError(
                    "'chat_template' in tokenizer_config.json must be a text, a mapping of names "
                    "to texts, or a list of objects with the texts 'name' and 'template'"
                )


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read the chat template {path}: {error}") from error
