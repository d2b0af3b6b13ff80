import signal
import subprocess
import sys
import types
import typing
from importlib import import_module

import pytest

import pdserve
import pdserve.commands.cli
from pdserve.__main__ import run
from pdserve.commands.cli.bench import BENCHES, COMPARISONS, INSTRUMENTS
from pdserve.commands.cli.main import build_parser, main
from pdserve.settings.config import CoordinatorConfig, NodeConfig
from pdserve.settings.described import settings_of
from pdserve.shared.errors import ClusterError, ConfigError, KvBudgetTooSmall, MissingTensor
from pdserve.shared.process.may_pass import NotNow
from tests.matrix import matrix


@pytest.fixture
def processes(monkeypatch):
    """What each process was run with, instead of running; a test may have it raise."""
    calls: dict[str, object] = {"error": None}

    def replace(package: types.ModuleType | None, name: str, run: object) -> None:
        module = types.ModuleType(name)
        module.run = run
        monkeypatch.setitem(sys.modules, name, module)
        if package is not None:
            monkeypatch.setattr(package, name.rpartition(".")[2], module, raising=False)

    def called(name: str, config: object) -> None:
        calls[name] = config
        if calls["error"] is not None:
            raise calls["error"]

    monkeypatch.setitem(sys.modules, "coordinator", types.ModuleType("coordinator"))
    replace(None, "coordinator.main", lambda config: called("coordinator", config))
    replace(
        pdserve.commands.cli,
        "pdserve.commands.cli.node",
        lambda config, role: called(role.name.lower(), config),
    )
    return calls


@pytest.mark.parametrize(
    ("command", "config"),
    [
        ("coordinator", CoordinatorConfig(port=9)),
        ("prefill", NodeConfig(port=9)),
        ("decode", NodeConfig(port=9)),
    ],
)
def test_a_process_is_run_with_its_config(command, config, processes):
    assert main([command, "--port=9"]) == 0
    assert processes == {"error": None, command: config}


def test_a_pipe_that_breaks_elsewhere_is_a_bug(processes):
    processes["error"] = BrokenPipeError("of a rank")
    with pytest.raises(BrokenPipeError, match="of a rank"):
        main(["decode"])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no"), 2),
        (MissingTensor("no"), 2),
        (KvBudgetTooSmall("no"), 2),
        (NotNow("a full disk"), 1),
        (ClusterError("no\n  way"), 1),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(error, code, processes, capsys):
    processes["error"] = error
    assert main(["decode"]) == code
    message = " ".join(str(error).split())
    assert capsys.readouterr().err == f"pdserve decode: error: {message}\n"


def test_an_unknown_key_in_the_file_is_named(tmp_path, capsys):
    file = tmp_path / "n.toml"
    file.write_text("[engine]\nblok_size = 3\n")
    assert main(["decode", f"--config={file}"]) == 2
    assert "blok_size" in capsys.readouterr().err


class Interrupted(list[str]):
    """Flags during whose parsing somebody hits Ctrl-C."""

    def __iter__(self):
        raise KeyboardInterrupt


def test_ctrl_c_is_130_whenever_it_comes(processes, monkeypatch):
    processes["error"] = KeyboardInterrupt()
    assert main(["prefill"]) == 130
    assert main(Interrupted()) == 130
    monkeypatch.setitem(sys.modules, "pdserve.commands.cli.main", Unloadable("main"))
    assert run() == 130


class Unloadable(types.ModuleType):
    """A module during whose import somebody hits Ctrl-C."""

    def __getattribute__(self, name):
        raise KeyboardInterrupt


def test_ctrl_c_is_heard_where_a_shell_has_it_ignored(processes):
    """As it has for what runs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main(["prefill"]) == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_output_that_is_full_or_closed_ends_in_words():
    command = [sys.executable, "-m", "pdserve", "config"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "pdserve: error: [Errno 28] No space left on device\n"
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    ended = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_version(capsys):
    with pytest.raises(SystemExit) as info:
        main(["--version"])
    assert info.value.code == 0
    assert capsys.readouterr().out == f"pdserve {pdserve.__version__}\n"


@pytest.mark.parametrize(
    "command", ["up", "coordinator", "prefill", "decode", "status", "doctor", "demo"]
)
def test_every_command_has_help_without_hidden_flags(command, capsys):
    with pytest.raises(SystemExit) as info:
        build_parser().parse_args([command, "--help"])
    assert info.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: pdserve {command}" in out
    assert "die-with-parent" not in out


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.name)
def test_a_benchmark_has_a_module_that_runs_its_config(bench):
    hints = typing.get_type_hints(import_module(bench.module).run)
    assert hints == {"config": bench.config, "setup": dict[str, object], "return": int}


@pytest.mark.parametrize("bench", matrix(BENCHES, 2), ids=lambda bench: bench.name)
def test_a_benchmark_has_help(bench, capsys):
    with pytest.raises(SystemExit) as info:
        build_parser().parse_args(["bench", bench.name, "--help"])
    assert info.value.code == 0
    assert f"pdserve bench {bench.name}: {bench.text}" in " ".join(capsys.readouterr().out.split())
    assert all(flag.description for flag in settings_of(bench.config))


def test_no_command_is_the_users_fault(capsys):
    with pytest.raises(SystemExit) as info:
        main([])
    assert info.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.long  # test_contracts.py has it by default
def test_the_entry_module_loads_neither_torch_nor_a_server():
    code = (
        "import sys, pdserve.commands.cli.main;"
        "print([m for m in ('torch', 'grpc', 'aiohttp', 'rich') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out == "[]\n"


def test_instruments_are_listed_apart_from_the_comparisons(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["bench", "--help"])
    for_users, for_developers = capsys.readouterr().out.split("developers' instruments")
    for benches, where in ((COMPARISONS, for_users), (INSTRUMENTS, for_developers)):
        for bench in benches:
            assert f" {bench.name} {bench.text}" in " ".join(where.split())
