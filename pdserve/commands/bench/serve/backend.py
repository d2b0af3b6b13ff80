"""Servers that a benchmark compares: some run already, others it starts and ends itself.

* `name=http://127.0.0.1:8000`: a server that runs already.
* `name=COMMAND`, with {port} and {model} or {gguf} (the model as one file): starts one.
* `vllm=VENV`: a command that is known (`RECIPES`); `vllm:second=VENV`: again, by another name.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.shared.errors import ConfigError

# Known commands. {given} is what follows the name.
RECIPES: Final = {
    # Options of `pdserve up`.
    "pdserve": f"{shlex.quote(sys.executable)} -m pdserve up --model {{model}} --port {{port}} "
    "{given}",
    # A virtual environment with vLLM for CPUs. It binds its threads to cores itself, which was the
    # fastest way of those that we tried (docs/MEASUREMENTS.md).
    "vllm": "env VLLM_CPU_KVCACHE_SPACE=1 {given}/bin/python -m vllm.entrypoints.openai.api_server "
    "--model {model} --host 127.0.0.1 --port {port} --max-model-len auto",
    # The path of llama.cpp's `llama-server`.
    "llama.cpp": "{given} --model {gguf} --host 127.0.0.1 --port {port} --threads {threads} "
    "--threads-batch {threads} --parallel 16 --ctx-size 65536",
}
_PLACE = re.compile(r"\{(\w+)\}")
_NAME = re.compile(r"[\w.:/+-]{1,64}")


@dataclass(frozen=True, slots=True)
class Backend:
    """A server, by its URL or by the command that starts it."""

    name: str
    url: str = ""  # of one that runs already
    command: str = ""  # of one that is to be started
    model: str = ""  # to ask for; empty: the first that it lists

    @property
    def places(self) -> set[str]:
        """The names in braces that its command has."""
        return set(_PLACE.findall(self.command))

    def argv(self, places: Mapping[str, str]) -> list[str]:
        """Return its command; braces that are not in `places` are left as they are."""

        def fill(word: str) -> str:
            return _PLACE.sub(lambda match: places.get(match[1], match[0]), word)

        return [fill(word) for word in shlex.split(self.command)]


def parse_backends(texts: Sequence[str], recipes: Mapping[str, str] = RECIPES) -> list[Backend]:
    """Parse all backends of a comparison; `recipes` are commands by name, as `RECIPES`.

    Raises:
        ConfigError: one cannot be parsed, or two share a name.
    """
    backends = [parse_backend(text, recipes) for text in texts]
    names = [backend.name for backend in backends]
    if len(set(names)) < len(names):
        raise ConfigError(
            f'{", ".join(names)}: two servers share a name; "vllm:second" is another one'
        )
    return backends


def parse_backend(text: str, recipes: Mapping[str, str] = RECIPES) -> Backend:
    """Parse NAME=URL, NAME=COMMAND, or a recipe.

    Raises:
        ConfigError: it is none of these; says what it must be.
    """
    name, _, given = text.partition("=")
    if not _NAME.fullmatch(name) or not given.strip():
        raise ConfigError(
            f'"{text}" must be NAME=URL or NAME=COMMAND, as in vllm=http://127.0.0.1:8000'
        )
    if re.match("https?://", given):
        return Backend(name, url=given)
    if "{port}" in given:
        command = given
    elif (recipe := recipes.get(name.partition(":")[0])) is not None:
        command = recipe.replace("{given}", given)
    else:
        raise ConfigError(
            f'"{text}": must be a URL, a command with {{port}}, or for one of {", ".join(recipes)} '
            "what its recipe needs"
        )
    try:
        shlex.split(command)
    except ValueError as error:
        raise ConfigError(f'"{text}": cannot be split into words: {error}') from error
    return Backend(name, command=command)
