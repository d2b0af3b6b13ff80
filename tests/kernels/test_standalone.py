"""The kernels without Python or torch: for Arm, in an emulator or on an Arm machine itself."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

# Compilers take long on a busy machine: seconds of work on two idle cores.
pytestmark = pytest.mark.timeout(500)

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
        timeout=300,
    )
    return folder / "kernel_check"


def variants(*command: str | Path) -> list[str]:
    """The kernel builds that the checks ran, all of which passed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split(":")[0] for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need(ARM_COMPILER, EMULATOR)
    return build(tmp_path_factory.mktemp("arm"), FAST_COMPILE, *ARM_FLAGS)


@pytest.mark.skipif(platform.machine() != "aarch64", reason="the other kernel tests run x86's")
def test_on_an_arm_machine(tmp_path: Path) -> None:
    need("c++")
    assert variants(build(tmp_path, FAST_COMPILE))[-1] == "neon"


def test_arm_with_bfloat16(arm_program: Path) -> None:
    assert variants(EMULATOR, "-cpu", "max", arm_program) == ["neon_bf16", "neon"]


def test_arm_without_bfloat16_does_not_choose_it(arm_program: Path) -> None:
    assert variants(EMULATOR, "-cpu", "cortex-a72", arm_program, "list") == ["neon"]
