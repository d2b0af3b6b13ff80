"""`pdserve config`: what it prints is a config file that says where each value is from."""

import subprocess
import sys
import tomllib

import msgspec
import pytest

from pdserve.commands.cli.main import main
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.settings.access import API_KEY_VARIABLE
from pdserve.settings.config import CoordinatorConfig, NodeConfig
from pdserve.settings.described import settings_of
from pdserve.settings.struct import ConfigStruct
from tests.matrix import matrix

STRUCTS = {
    "up": ClusterConfig,
    "coordinator": CoordinatorConfig,
    "prefill": NodeConfig,
    "decode": NodeConfig,
}


def printed(capsys, *words: str) -> str:
    assert main(["config", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", STRUCTS)
def test_every_setting_is_printed(command, capsys):
    text = printed(capsys, command)
    names = [setting.path[-1] for setting in settings_of(STRUCTS[command])]
    assert [name for name in names if f"{name} = " not in text and f"# {name} is" not in text] == []
    assert text.startswith(f"# pdserve {command}: ")


def test_the_default_command_is_up(capsys):
    assert printed(capsys) == printed(capsys, "up")


@pytest.mark.parametrize("command", STRUCTS)
def test_what_is_printed_makes_the_same_settings(command, capsys, tmp_path):
    words = ['--model=/a\\b "c" é', "--set=timeouts.liveness_s=1e5", "--set=transports=shm,tcp"]
    if command == "coordinator":
        words[-1] = "--cors-origins=https://a.org,*"
    text = printed(capsys, command, *words)
    file = tmp_path / "again.toml"
    file.write_text(text)
    again = printed(capsys, command, f"--config={file}")
    assert config(command, again) == config(command, text) != STRUCTS[command]()


def config(command: str, text: str) -> ConfigStruct:
    return msgspec.convert(tomllib.loads(text), STRUCTS[command])


def origin(text: str, name: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith((f"{name} = ", f"# {name} ")))
    return line.rpartition("# ")[2]


def test_the_origin_of_each_value_is_told(capsys, tmp_path):
    file = tmp_path / "node.toml"
    file.write_text('port = 7\n[engine]\nkv_memory = "1GiB"\nthreads = 2\n')
    words = ["--threads=3", "--set=policy.watermark=0"]
    text = printed(capsys, "decode", f"--config={file}", *words)
    assert origin(text, "port") == origin(text, "kv_memory") == f"file {file}"
    assert "threads = 3 " in text
    assert origin(text, "threads") == origin(text, "watermark") == "flag"
    assert origin(text, "host") == origin(text, "revision") == "default"


def test_the_environment_is_told_without_its_secret(capsys, monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "sk-secret")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    text = printed(capsys)
    assert f"# {API_KEY_VARIABLE}: set " in text
    assert "# XDG_CACHE_HOME: /somewhere " in text
    assert "sk-secret" not in text
    monkeypatch.delenv(API_KEY_VARIABLE)
    assert f"# {API_KEY_VARIABLE}: not set " in printed(capsys)


def test_what_would_be_refused_is_refused(capsys, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[engine]\nkv_memry = 1\n")
    assert main(["config", "up", f"--config={file}"]) == 2
    said = capsys.readouterr().err
    assert "there is no setting `engine.kv_memry`; did you mean `engine.kv_memory`?" in said


@pytest.mark.long  # a closed output is by default
@pytest.mark.parametrize("words", matrix([["config"], ["up", "--help"]], 1), ids=" ".join)
def test_a_reader_that_has_seen_enough_is_no_error(words: list[str]) -> None:
    """As `pdserve config | head -1`."""
    command = [sys.executable, "-m", "pdserve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.close()
        _, told = running.communicate(timeout=30)
    assert (running.returncode, told) == (0, b"")
