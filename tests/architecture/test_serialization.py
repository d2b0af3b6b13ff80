"""What arrives is parsed, never run: no serialisation that can call code, no evaluation."""

import ast

import pytest

from tests.architecture.repository import ROOT, python_files, tree_of

RUNNING_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
RUNNING_BUILTINS = {"eval", "exec", "compile", "__import__"}
# Read pickles: torch's and NumPy's own files, and objects sent between processes.
UNPICKLING = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("pd", "read_pickle")}


def offences(tree: ast.Module) -> list[str]:
    """Every use of something that can run what it reads."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [n.name for n in names if n.name.split(".")[0] in RUNNING_MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in RUNNING_MODULES:
                found.append(module)
            case ast.Call(func=ast.Name(id=called)) if called in RUNNING_BUILTINS:
                found.append(called)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=called)) if (
                owner,
                called,
            ) in UNPICKLING:
                found.append(f"{owner}.{called}")
            case ast.keyword(arg="allow_pickle"):
                found.append("allow_pickle")
    return found


def test_nothing_is_unpickled_or_evaluated():
    found = {path: offences(tree_of(path)) for path in python_files()}
    assert {str(path.relative_to(ROOT)): uses for path, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal",
        "from pickle import loads",
        "import cloudpickle.cloudpickle",
        "def f(x):\n    return eval(x)",
        "import torch\ntorch.load(path)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_an_offence_is_found(source):
    assert offences(ast.parse(source))


def test_what_only_looks_like_one_is_not():
    source = "model.eval()\nweights.load(path)\nre.compile('x')\nimport pickles"
    assert offences(ast.parse(source)) == []
