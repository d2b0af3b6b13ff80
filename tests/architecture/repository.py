"""Where things are in this repository, for the tests that look at its files."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pdserve", "kv_transfer", "prefill_node", "decode_node", "coordinator")


def python_files() -> list[Path]:
    """Every source file that a person wrote."""
    files = [path for package in (*PACKAGES, "tools") for path in (ROOT / package).rglob("*.py")]
    assert files
    return sorted(path for path in files if "_pb2" not in path.name)


def native_files() -> list[Path]:
    """Every C++ and CUDA file."""
    suffixes = {".cpp", ".h", ".cu", ".cuh"}
    files = [path for folder in ("csrc", *PACKAGES) for path in (ROOT / folder).rglob("*")]
    return sorted(path for path in files if path.suffix in suffixes)


def run(*command: str) -> str:
    """Run a command in the repository; its output, which is what a failure shows."""
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
