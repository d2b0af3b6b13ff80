"""The kernels without Python or torch: for Arm, in an emulator or on an Arm machine itself."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

# Compilers take long on a busy machine: minutes of work on two idle cores.
pytestmark = pytest.mark.timeout(7200)

SOURCE = Path(__file__).parent / "standalone"
ARM_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
ARM_FLAGS = [
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    f"-DCMAKE_CXX_COMPILER={ARM_COMPILER}",
    "-DCMAKE_EXE_LINKER_FLAGS=-static",
]
FAST_COMPILE = "-DCMAKE_CXX_FLAGS_RELEASE=-O1"


def missing(*programs: str) -> list[str]:
    return [name for name in programs if shutil.which(name) is None]


def need(*programs: str) -> None:
    if absent := missing(*programs):
        pytest.skip(f"{', '.join(absent)} not installed")


def build(folder: Path, *flags: str) -> Path:
    """Compile the checks; returns the program."""
    need("cmake", "ninja")
    subprocess.run(
        ["cmake", "-G", "Ninja", "-S", SOURCE, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", *flags],
        check=True,
        stdout=subprocess.PIPE,
        timeout=60,
    )
    subprocess.run(
        ["cmake", "--build", folder, "--parallel", "2"],
        check=True,
        stdout=subprocess.PIPE,
        timeout=3000,
    )
    return folder / "kernel_check"


def variants(*command: str | Path) -> dict[str, str]:
    """The kernel builds that the checks ran, all of which passed: what was said of each."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split(":", 1) for line in done.stdout.splitlines())


def bits_of(said: dict[str, str]) -> set[str]:
    """The digests of products of integers."""
    return {line.split()[-1] for line in said.values()}


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need(ARM_COMPILER, EMULATOR)
    return build(tmp_path_factory.mktemp("arm"), FAST_COMPILE, *ARM_FLAGS)


@pytest.mark.skipif(platform.machine() != "aarch64", reason="the other kernel tests run x86's")
def test_on_an_arm_machine(tmp_path: Path) -> None:
    need("c++")
    assert list(variants(build(tmp_path, FAST_COMPILE)))[-1] == "neon"


@pytest.mark.long
def test_arm_has_the_bits_of_this_machine(arm_program: Path, tmp_path: Path) -> None:
    """With all extensions: those of bfloat16, and dot products of bytes."""
    arm = variants(EMULATOR, "-cpu", "max", arm_program)
    assert list(arm) == ["neon_bf16", "neon_dot", "neon"]
    here = variants(build(tmp_path, FAST_COMPILE))
    assert len(bits_of(arm) | bits_of(here)) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("cpu", "builds"), [("cortex-a76", ["neon_dot", "neon"]), ("cortex-a72", ["neon"])]
)
def test_older_arm_chooses_what_it_has(arm_program: Path, cpu: str, builds: list[str]) -> None:
    said = variants(EMULATOR, "-cpu", cpu, arm_program)
    assert list(said) == builds
    assert len(bits_of(said)) == 1
