"""What every source file has in common."""

import ast
import re

from pdserve.shared import errors
from tests.architecture.repository import PACKAGES, ROOT, native_files, python_files, tree_of

MOST_LINES = 470
TOPICLESS = {"utils", "util", "helpers", "helper", "common", "misc"}


def name(path) -> str:
    return str(path.relative_to(ROOT))


def test_a_file_has_one_job():
    lengths = {
        name(path): len(path.read_text().splitlines()) for path in python_files() + native_files()
    }
    assert [path for path, length in lengths.items() if length > MOST_LINES] == []


def test_no_module_is_a_drawer():
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*")]
    assert [name(path) for path in paths if path.stem in TOPICLESS] == []


def test_every_module_says_what_it_is_for():
    undocumented = [
        name(path)
        for path in python_files()
        if tree_of(path).body and not ast.get_docstring(tree_of(path))
    ]
    assert undocumented == []


def test_the_error_tree_shows_every_error_below_its_parent():
    drawn: dict[str, str | None] = {}  # class |-> the one it hangs from
    trail: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r"    ([ │├└─]*)([A-Z]\w+)(\s.*)?", line)
        if match:
            depth = len(match[1])
            trail = [(d, n) for d, n in trail if d < depth]
            drawn[match[2]] = trail[-1][1] if trail else None
            trail.append((depth, match[2]))
    defined = {
        cls.__name__: cls.__base__.__name__ if cls is not errors.PdserveError else None
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.PdserveError)
    }
    assert drawn == defined


def test_every_error_has_a_code_of_its_own():
    classes = errors._tree(errors.PdserveError)
    named = [
        cls for cls in classes if cls.__module__ == "pdserve.shared.errors" and "code" in vars(cls)
    ]
    codes = [cls.code for cls in named]
    assert len(codes) == len(set(codes))
    for cls in named:
        assert type(errors.from_code(cls.code, "text")) is cls
