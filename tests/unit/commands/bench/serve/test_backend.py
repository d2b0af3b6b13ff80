"""Backends of a benchmark, as they are written."""

from __future__ import annotations

import pytest

from pdserve.commands.bench.serve.backend import RECIPES, parse_backend, parse_backends
from pdserve.shared.errors import ConfigError

PLACES = {"model": "/m o", "port": "81", "threads": "2"}


def test_a_server_that_runs_already() -> None:
    backend = parse_backend("other=https://example.org/v1")
    assert (backend.name, backend.url) == ("other", "https://example.org/v1")
    assert backend.argv(PLACES) == []


def test_a_command_is_split_as_a_shell_does_and_then_filled() -> None:
    backend = parse_backend(
        """mine=serve '{"a": {port}}' --model {model} --port={port} {unknown} "x y" """
    )
    assert backend.places == {"port", "model", "unknown"}
    assert backend.argv(PLACES) == [
        "serve",
        '{"a": 81}',
        "--model",
        "/m o",
        "--port=81",
        "{unknown}",
        "x y",
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_command_that_serves_the_model_at_the_port(name: str) -> None:
    backend = parse_backend(f"{name}:again=--mode colocated")
    argv = backend.argv(PLACES | {"gguf": "/m o"})
    assert backend.name == f"{name}:again"
    assert "/m o" in argv
    assert "81" in argv
    assert "--mode" in " ".join(argv)
    assert not [word for word in argv if "{" in word]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must be NAME=URL or NAME=COMMAND"),
        ("vllm", "must be NAME=URL or NAME=COMMAND"),
        ("vllm= ", "must be NAME=URL or NAME=COMMAND"),
        ("a b=http://it", "must be NAME=URL or NAME=COMMAND"),
        ("mine=serve --port 80", "a command with {port}, or for one of pdserve, vllm, llama.cpp"),
        ("mine=serve '{port}", "cannot be split into words: No closing quotation"),
    ],
)
def test_what_is_wrong_is_said(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_backend(text)


def test_two_of_one_name() -> None:
    with pytest.raises(ConfigError, match="two servers share a name"):
        parse_backends(["vllm=/a", "vllm=/b"])
    assert [one.name for one in parse_backends(["vllm=/a", "vllm:b=/b"])] == ["vllm", "vllm:b"]
