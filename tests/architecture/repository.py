"""Where things are in this repository, for the tests that look at its files."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pdserve", "kv_transfer", "prefill_node", "decode_node", "coordinator")


@cache
def python_files() -> list[Path]:
    """Every source file that a person wrote."""
    files = [path for package in (*PACKAGES, "tools") for path in (ROOT / package).rglob("*.py")]
    assert files
    return sorted(path for path in files if "_pb2" not in path.name)


@cache
def native_files() -> list[Path]:
    """Every C++ and CUDA file."""
    suffixes = {".cpp", ".h", ".cu", ".cuh"}
    files = [path for folder in ("csrc", *PACKAGES) for path in (ROOT / folder).rglob("*")]
    return sorted(path for path in files if path.suffix in suffixes)


@cache
def tree_of(path: Path) -> ast.Module:
    """What a Python file is parsed to, until these tests are over."""
    return ast.parse(path.read_text())


def run(*command: str) -> str:
    """Run a command in the repository; its output, which is what a failure shows."""
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
