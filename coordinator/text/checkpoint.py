"""Reads the chat template of a checkpoint folder, without compiling it."""

from __future__ import annotations

from pathlib import Path

from pdserve.errors import TokenizerError
from pdserve.model_files.tokenizer import TokenizerConfig


def load_chat_template(folder: Path, config: TokenizerConfig) -> str | None:
    """Return the source of the default chat template; a separate file precedes the config."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.values.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    named = {entry["name"]: entry["template"] for entry in template}
    if "default" not in named:
        raise TokenizerError(
            f"tokenizer_config.json names chat templates {sorted(named)}, but none is 'default'"
        )
    return str(named["default"])
