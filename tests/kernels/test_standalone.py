"""The kernels without Python or torch: on this machine, and for Arm in an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "standalone"
ARM_COMPILER = "aarch64-linux-gnu-g++"
ARM_FLAGS = [
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    f"-DCMAKE_CXX_COMPILER={ARM_COMPILER}",
    "-DCMAKE_EXE_LINKER_FLAGS=-static",
]


def need(*programs: str) -> None:
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


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


def checked_variants(*command: str | Path) -> list[str]:
    """Run the checks; returns the kernel builds that passed them."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split(":")[0] for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need(ARM_COMPILER, "qemu-aarch64")
    return build(tmp_path_factory.mktemp("arm"), *ARM_FLAGS)


def test_on_this_machine(tmp_path: Path) -> None:
    """Hardly optimised: the other kernel tests check what is installed."""
    need("c++")
    program = build(tmp_path, "-DCMAKE_CXX_FLAGS_RELEASE=-O1")
    assert checked_variants(program)[-1] in ("portable", "neon")


def test_arm_with_bfloat16(arm_program: Path) -> None:
    found = checked_variants("qemu-aarch64", "-cpu", "max", arm_program)
    assert found == ["neon_bf16", "neon"]


def test_arm_without_bfloat16_does_not_choose_it(arm_program: Path) -> None:
    assert checked_variants("qemu-aarch64", "-cpu", "cortex-a72", arm_program) == ["neon"]
