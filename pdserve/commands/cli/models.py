"""`pdserve models`: lists the models of a file, and adds, removes and pins them.

The file is people's: what they wrote in it, comments too, stays as it is.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pdserve.settings.cascades import RegisteredCascade
from pdserve.settings.models import RegisteredModel, parse_models, read_models
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.exit_codes import OK

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_HEADER: Final = re.compile(r"^\s*\[", re.MULTILINE)


def run(file: str, action: str, words: Sequence[str]) -> int:
    """Carry out `action` ("" lists) with its words, and print what there is then; the exit code.

    Raises:
        PdserveError: the file cannot be read or written, or would be wrong; or a model cannot be
            found.
    """
    path = Path(file).expanduser()
    change = _CHANGES.get(action)
    if change is not None:
        text = path.read_text() if path.exists() or action != "add" else ""
        new = change(text, path, words)
        parse_models(new, path)
        _write(path, new)
    found = read_models(file)
    print("\n".join([*table(found.models), *cascades(found.cascades)]))
    return OK


def cascades(registered: dict[str, RegisteredCascade]) -> list[str]:
    """One line for each cascade, after an empty one."""
    lines = [
        f"cascade {name}: {' -> '.join(tier.name for tier in one.tiers)}"
        for name, one in registered.items()
    ]
    return ["", *lines] if lines else []


def table(models: dict[str, RegisteredModel]) -> list[str]:
    """One line for each model."""
    rows = [("model", "source", "pinned to", "own nodes", "aliases")]
    for name, model in models.items():
        own = f"{model.min.prefill}+{model.min.decode}"
        pin = (model.digest or model.revision or "-")[:12]
        rows.append((name, model.source, pin, own, ", ".join(model.aliases) or "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


# ---- changes of the text; each raises ConfigError ------------------------------------------------


def added(text: str, path: Path, words: Sequence[str]) -> str:
    """Return it with a model: its name, its source, and further KEY=VALUE, as in TOML."""
    if len(words) < 2:
        raise ConfigError("add: give a name, a source and, if you like, KEY=VALUE ...")
    name, source, *values = words
    if text.strip() and name in parse_models(text, path).models:
        raise ConfigError(f"{path}: there is a model {name!r} already")
    lines = [f"[models.{_key(name)}]", f"source = {json.dumps(source)}"]
    for value in values:
        key, is_there, said = value.partition("=")
        if not is_there:
            raise ConfigError(f"{value!r}: write KEY=VALUE, with the value as in TOML")
        lines.append(f"{key.strip()} = {said.strip()}")
    before = f"{text.rstrip()}\n\n" if text.strip() else ""
    return before + "\n".join(lines) + "\n"


def removed(text: str, path: Path, words: Sequence[str]) -> str:
    """Return it without the model of this name."""
    name = _one(words, "remove")
    begin, end = _block(text, path, name)
    return text[:begin] + text[end:]


def pinned(text: str, path: Path, words: Sequence[str]) -> str:
    """Return it with a model held to what its source is now: a commit, or a digest of files."""
    from pdserve.model_files.checkpoint import resolve_checkpoint  # slow to import
    from pdserve.model_files.objects.opening import is_object_url

    name = _one(words, "pin")
    _, model = parse_models(text, path).find(name)
    is_here = is_object_url(model.source) or Path(model.source).expanduser().exists()
    checkpoint = resolve_checkpoint(model.source, model.revision, with_weights=is_here)
    key = "digest" if is_here else "revision"
    return _with_value(text, path, name, key, checkpoint.revision)


def unpinned(text: str, path: Path, words: Sequence[str]) -> str:
    """Return it with a model that follows its source again."""
    name = _one(words, "unpin")
    begin, end = _block(text, path, name)
    block = re.sub(r"(?m)^\s*(digest|revision)\s*=.*\n?", "", text[begin:end])
    return text[:begin] + block + text[end:]


_CHANGES: Final = {"add": added, "remove": removed, "pin": pinned, "unpin": unpinned}


def _with_value(text: str, path: Path, name: str, key: str, value: str) -> str:
    begin, end = _block(text, path, name)
    line, block = f"{key} = {json.dumps(value)}", text[begin:end]
    block, number = re.subn(rf"(?m)^\s*{key}\s*=.*$", line, block, count=1)
    if not number:
        header, _, rest = block.partition("\n")
        block = f"{header}\n{line}\n{rest}"
    return text[:begin] + block + text[end:]


def _block(text: str, path: Path, name: str) -> tuple[int, int]:
    """Return where the table of a model begins and ends."""
    own, _ = parse_models(text, path).find(name)
    names = "|".join(re.escape(one) for one in {own, f'"{own}"', f"'{own}'"})
    found = re.search(rf"(?m)^[ \t]*\[\s*models\s*\.\s*(?:{names})\s*\].*\n?", text)
    if found is None:
        raise ConfigError(f"{path}: models.{name} has no line [models.{_key(own)}]: edit it there")
    after = _HEADER.search(text, found.end())
    return found.start(), len(text) if after is None else after.start()


def _one(words: Sequence[str], action: str) -> str:
    if len(words) != 1:
        raise ConfigError(f"{action}: give the name of one model")
    return words[0]


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)


def _write(path: Path, text: str) -> None:
    """Write all of it, or nothing: processes may read it meanwhile."""
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(handle)
        Path(name).chmod(mode)
        Path(name).replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
