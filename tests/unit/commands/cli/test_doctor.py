import io
import json
import re
import sys
from unittest.mock import Mock

import pytest
from rich.console import Console

from kv_transfer.transports import pool_share
from kv_transfer.transports.catalog import KINDS, TransportKind
from pdserve.commands.cli.doctor import command, devices, machine, software, transports
from pdserve.commands.cli.doctor.caches import cache_components
from pdserve.commands.cli.doctor.component import Availability, Component
from pdserve.commands.cli.main import main
from pdserve.shared.errors import PeerLost
from tests.fakes.cards import show_cards
from tests.fakes.transport import FakeNetwork


def test_the_quota_of_a_cgroup():
    assert machine.cpu_quota("150000 100000\n") == 1.5
    assert machine.cpu_quota("max 100000\n") is None
    assert machine.cpu_quota("") is None


def test_processor_and_memory_are_read(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nmodel name\t: Zen 9\nflags\t: a b\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal:  4194304 kB\nMemAvailable:  1048576 kB\n")
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text(f"{2 * 2**30}\n")
    (cgroup / "cpu.max").write_text("50000 100000\n")
    details = {found.name: found.detail for found in machine.machine_components(tmp_path)}
    assert details["processor"] == "Zen 9"
    assert details["memory"] == "1.0 GiB available of 4.0 GiB, limited to 2.0 GiB"
    assert details["cores"].endswith("limited to 0.5 cores' worth of time")


def test_a_strange_machine_is_unknown_and_not_an_error(tmp_path):
    details = {found.name: found.detail for found in machine.machine_components(tmp_path)}
    assert (details["processor"], details["memory"]) == ("unknown", "unknown")


def test_rdma_devices(tmp_path):
    (absent,) = devices.rdma_components(tmp_path / "none")
    assert (absent.verdict, absent.name) == (Availability.ABSENT, "devices")
    port = tmp_path / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in [("state", "4: ACTIVE"), ("rate", "400 Gb/sec"), ("link_layer", "Ethernet")]:
        (port / name).write_text(text + "\n")
    (found,) = devices.rdma_components(tmp_path)
    assert (found.name, found.detail) == ("mlx5_0", "port 1: 4: ACTIVE, 400 Gb/sec, Ethernet")


def test_no_torch_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (found,) = devices.gpu_components()
    assert found.verdict is Availability.ABSENT
    assert "torch cannot be imported" in found.detail


def test_kinds_of_attention_and_why_not(monkeypatch):
    show_cards(monkeypatch, [])
    found = devices.attention_components()
    assert [f.name for f in found] == ["flashinfer", "flash_attn", "triton", "reference"]
    assert [f.verdict for f in found] == [Availability.ABSENT] * 3 + [Availability.OK]
    assert found[0].detail == "torch finds no GPU"


def test_a_missing_extension_is_broken_and_says_how_to_build_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pdserve._native", None)
    (found,) = software.native_components()
    assert found.verdict is Availability.BROKEN
    assert "make env" in found.detail


@pytest.mark.long
def test_transports_are_tried_out(monkeypatch):
    def broken_memory(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(pool_share, "_receive_descriptor", broken_memory)
    by_name = {found.name: found for found in transports.transport_components()}
    assert list(by_name) == [kind.name for kind in KINDS]
    assert by_name["tcp"].verdict is Availability.OK
    assert by_name["shm"].verdict is Availability.ABSENT
    assert "Function not implemented" in by_name["shm"].detail


async def test_a_transport_that_delivers_something_else_does_not_work():
    network = FakeNetwork()
    fake = TransportKind("fake", network.server, network.transport, frozenset({"cpu"}))
    assert await transports.failure(fake) == ""
    network.fail_with = PeerLost("no route")
    assert "no route" in await transports.failure(fake)


def test_what_is_absent_is_shown_with_what_it_is_needed_for():
    finding = Component(
        topic="RDMA", name="devices", verdict=Availability.ABSENT, detail="none", needed_for="speed"
    )
    console = Console(width=100, file=io.StringIO())
    console.print(command.render([finding]))
    assert "absent" in console.file.getvalue()
    assert "none; needed for speed" in console.file.getvalue()


def test_what_is_kept_between_starts_is_counted_and_may_be_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    weights = tmp_path / "pdserve" / "weights"
    weights.mkdir(parents=True)
    (weights / "a.packed").write_bytes(bytes(3 << 20))
    (weights / "a.lock").touch()
    details = {found.name: found.detail for found in cache_components()}
    assert details["packed weights"] == f"1 files, 3 MiB in {weights}; remove them at any time"
    assert details["profiles"].startswith("0 files")


def test_without_a_home_nothing_is_kept(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", Mock(side_effect=RuntimeError))
    assert {found.verdict for found in cache_components()} == {Availability.ABSENT}


def test_required_packages_come_from_the_distribution():
    names = software.required_packages()
    assert {"torch", "grpcio", "rich"} <= set(names)
    assert "pytest" not in names


@pytest.mark.parametrize("verdict", [Availability.OK, Availability.ABSENT, Availability.BROKEN])
def test_the_exit_code_tells_whether_pdserve_can_work(verdict, monkeypatch, capsys):
    finding = Component(topic="t", name="n", verdict=verdict, detail="d")
    monkeypatch.setattr(command, "collect", lambda: [finding])
    assert main(["doctor", "--json"]) == (1 if verdict is Availability.BROKEN else 0)
    assert json.loads(capsys.readouterr().out)[0]["verdict"] == verdict


def test_everything_is_looked_at():
    """And the way of copying KV here is named."""
    components = command.collect()
    assert {found.topic for found in components} == {
        "machine",
        "native kernels",
        "GPUs",
        "attention on GPUs",
        "KV transports",
        "RDMA",
        "caches",
        "software",
    }
    (shm,) = (found for found in components if found.name == "shm")
    copies = (
        r"copies 64 KiB at [\d.]+ GB/s \((cached|prefetched|interleaved)\), "
        r"[\d.]+ with checksums, memcpy at [\d.]+$"
    )
    assert re.search(copies, shm.detail)
