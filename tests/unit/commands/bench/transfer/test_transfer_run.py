"""`pdserve bench transfer` with its real processes, in miniature."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.commands.bench.transfer.config import TransferConfig
from pdserve.commands.bench.transfer.ends import LAYER_BYTES
from pdserve.commands.bench.transfer.measurement import PullCase
from pdserve.commands.bench.transfer.network import Loopback, NetworkNamespaces
from pdserve.commands.bench.transfer.processes import start_ends
from pdserve.commands.bench.transfer.run import measure
from pdserve.commands.bench.transfer.wire import AskCpu, Cpu, Served
from pdserve.commands.cli.main import main
from pdserve.commands.cluster.supervisor import OWN_COMMAND
from pdserve.shared.errors import ClusterError, ConfigError
from tests.matrix import matrix

TINY = PullCase("loopback", LAYER_BYTES, pool_blocks=4, counts=[1], pull_s=5.0, commit=False)
NO_NAMESPACES = """#!/bin/sh
echo 'unshare: unshare failed: Operation not permitted' >&2
exit 1
"""


def test_the_report_is_json_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--transports=shm,tcp", "--networks=loopback", "--block-kib=32", "--blocks=1,8"]
    assert main(["bench", "transfer", "--json", "--memory=256KiB", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["rows", "skipped", "setup"]
    assert report["skipped"] == []
    rows = report["rows"]
    assert [(row["transport"], row["blocks"]) for row in rows] == [
        ("shm", 1),
        ("shm", 8),
        ("tcp", 1),
        ("tcp", 8),
    ]
    for row in rows:
        assert (row["network"], row["block_bytes"], row["pulls"]) == ("loopback", 32 << 10, 100)
        figures = ("gb_per_s", "memcpy_gb_per_s", "memcpy_ratio", "pull_us", "cpu_s_per_gb")
        assert all(row[figure] > 0 for figure in figures)


@pytest.mark.long
def test_the_table_names_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--transports=shm", "--networks=loopback", "--block-kib=32", "--blocks=1"]
    assert main(["bench", "transfer", *flags]) == 0
    out = capsys.readouterr().out
    assert "shm" in out
    assert "ratio" in out


async def test_without_the_right_to_make_namespaces_all_is_skipped_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tool in ("unshare", "nsenter", "ip"):
        program = tmp_path / tool
        program.write_text(NO_NAMESPACES)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    report = await measure(TransferConfig(transports=["shm", "tcp"], networks=["netns"]))
    assert report.rows == []
    assert [skipped.transport for skipped in report.skipped] == ["shm", "tcp"]
    assert all("Operation not permitted" in skipped.reason for skipped in report.skipped)


async def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install util-linux" in str(await NetworkNamespaces().obstacle())


@pytest.mark.long
async def test_between_two_namespaces_only_sockets_work() -> None:
    obstacle = await NetworkNamespaces().obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    before = network_devices()
    config = TransferConfig(
        transports=["shm", "tcp"], networks=["netns"], block_kib=[32], blocks=[1]
    )
    report = await measure(config)
    assert [row.transport for row in report.rows] == ["tcp"]
    assert [skipped.transport for skipped in report.skipped] == ["shm"]
    assert "another host" in report.skipped[0].reason
    assert network_devices() == before


def network_devices() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


@pytest.mark.long
async def test_a_process_that_dies_is_told_and_the_other_ends_too() -> None:
    async with asyncio.timeout(30), start_ends(TINY, Loopback(), deadline_s=20) as ends:
        assert (await ends.exporter.ask(AskCpu(), Cpu)).used_s > 0
        puller_pid = ends.puller.pid
        os.kill(ends.exporter.pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match="the exporter: signal SIGKILL"):
            await ends.exporter.ask(AskCpu(), Cpu)
    with pytest.raises(ProcessLookupError):
        os.kill(puller_pid, 0)


@pytest.mark.long
async def test_a_process_that_hangs_is_given_up() -> None:
    async with asyncio.timeout(30), start_ends(TINY, Loopback(), deadline_s=20) as ends:
        os.kill(ends.puller.pid, signal.SIGSTOP)
        ends.puller.deadline_s = 0.5
        with pytest.raises(ClusterError, match=r"the puller did not answer within 0\.5 s"):
            await ends.puller.ask(AskCpu(), Cpu)


@pytest.mark.long
async def test_a_process_that_was_asked_for_what_is_not_its_says_so() -> None:
    async with asyncio.timeout(30), start_ends(TINY, Loopback(), deadline_s=20) as ends:
        with pytest.raises(ClusterError, match="a puller does not support AskCpu"):
            await ends.puller.ask(AskCpu(), Served)


async def test_a_program_that_is_no_end_is_told() -> None:
    command = [sys.executable, "-c", "print('pdserve x: error: no such thing'); exit(2)"]
    with pytest.raises(ClusterError, match=r"exit code 2 .*: no such thing"):
        async with start_ends(TINY, Loopback(), deadline_s=20, command=command):
            pytest.fail("it was ready")


@pytest.fixture
def minds_ctrl_c() -> Iterator[None]:
    """Shells have background jobs ignore SIGINT; their children, and ours, would do so too."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.long  # one that hangs is given up by default
@pytest.mark.parametrize(
    ("number", "code"), matrix([(signal.SIGKILL, -9), (signal.SIGINT, 130)], 1)
)
def test_nothing_outlives_the_command(
    number: signal.Signals, code: int, minds_ctrl_c: None
) -> None:
    command = [*OWN_COMMAND, "bench", "transfer", "--networks=loopback", "--memory=64MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as bench:
        try:
            children = wait_for_children(bench.pid, 2)
            bench.send_signal(number)
            out, err = bench.communicate(timeout=20)
        finally:
            bench.kill()
    assert (bench.returncode, out, err) == (code, b"", b"")
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def wait_for_children(pid: int, count: int) -> list[psutil.Process]:
    end_s = time.monotonic() + 20
    while len(children := psutil.Process(pid).children()) < count:
        assert time.monotonic() < end_s, "it started no processes"
        time.sleep(0.02)
    return children


def test_the_ends_are_nothing_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    out = capsys.readouterr().out
    assert "transfer" in out
    assert "transfer-end" not in out


def test_a_quick_run_leaves_out_what_is_large() -> None:
    config = TransferConfig(quick=True)
    assert config.block_sizes == [64 << 10, 256 << 10, 1 << 20]
    assert config.counts == [1, 16, 256]
    with pytest.raises(ConfigError, match="needs at least one block size"):
        _ = TransferConfig(quick=True, block_kib=[4096]).block_sizes
    with pytest.raises(ConfigError, match="needs at least one number of blocks"):
        _ = TransferConfig(quick=True, blocks=[4096]).counts


def test_a_block_size_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--block-kib=33"]) == 2
    assert "must be a multiple" in capsys.readouterr().err
    assert main(["bench", "transfer", "--block-kib=64", "--pipeline-parallel=3"]) == 2
    assert "blocks of 64 KiB have 2 layers" in capsys.readouterr().err


@pytest.mark.long  # one rank is measured by default
def test_pools_of_ranks_and_stages_have_a_part_for_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--transports=shm", "--networks=loopback", "--block-kib=96", "--blocks=2"]
    divided = ["--tensor-parallel=2", "--pipeline-parallel=2"]
    assert main(["bench", "transfer", "--json", "--memory=1MiB", *flags, *divided]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["blocks"], row["parts"]) for row in report["rows"]] == [(2, 4)]
