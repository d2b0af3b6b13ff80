"""The Python files that people wrote, each with the part of the repository that it belongs to."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

AREAS = ("serving", "benchmarks", "training", "tests", "tools")
_BENCHMARKS = {"bench"}
_TRAINING = {"demo_model"}
_EXTENSION = "_native"  # a module, whose name is not a secret
_FAKES = Path("tests/fakes")


@dataclass(frozen=True)
class File:
    """One file, as it is now."""

    path: Path  # from the repository's root
    text: str

    @property
    def area(self) -> str:
        """One of AREAS."""
        parts = set(self.path.parts)
        if self.path.parts[0] in ("tests", "examples"):
            return "tests"
        if parts & _TRAINING and self.path.name != "__init__.py":
            return "training"
        if self.path.parts[0] == "tools":
            return "tools"
        return "benchmarks" if parts & _BENCHMARKS else "serving"

    @property
    def num_lines(self) -> int:
        """All of them, blank ones too."""
        return self.text.count("\n")

    @property
    def num_filled_lines(self) -> int:
        """Those that are not blank."""
        return sum(1 for line in self.text.splitlines() if line.strip())

    @property
    def is_test_helper(self) -> bool:
        """Whether tests share it: pytest collects nothing from it."""
        return self.area == "tests" and not self.path.name.startswith("test_")

    @property
    def is_fake(self) -> bool:
        """Whether it stands in for what is behind a seam, in tests."""
        return self.path.parent == _FAKES

    def private_imports(self) -> Iterator[str]:
        """Names with an underscore that it takes out of other modules."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                names = [*(node.module or "").split("."), *(each.name for each in node.names)]
            elif isinstance(node, ast.Import):
                names = [part for each in node.names for part in each.name.split(".")]
            else:
                continue
            for name in names:
                if name.startswith("_") and not name.startswith("__") and name != _EXTENSION:
                    yield name

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text, str(self.path))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All of them, methods and nested ones too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def public_classes(self) -> Iterator[str]:
        """Names of the module's own classes."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name

    @property
    def num_import_lines(self) -> int:
        """Lines of import statements."""
        imports = (n for n in ast.walk(self.tree) if isinstance(n, ast.Import | ast.ImportFrom))
        return sum(length(node) for node in imports)


def length(node: ast.stmt) -> int:
    """Lines from the first to the last, decorators not counted."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """All but `self` and `cls`."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def read_files(root: Path) -> list[File]:
    """The files that git knows below `root`, without generated ones."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [Path(line) for line in listed.stdout.splitlines() if "_pb2" not in line]
    there = [path for path in paths if (root / path).is_file()]  # not removed since
    return [File(path, (root / path).read_text()) for path in there]
