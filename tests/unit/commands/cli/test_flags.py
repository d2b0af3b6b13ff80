from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from pdserve.commands.cli.main import build_parser
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.settings.config import WHOLE, CoordinatorConfig, EngineConfig, NodeConfig
from pdserve.settings.described import settings_of
from pdserve.settings.flags import FlagParser, add_flags, as_flags, config_from
from pdserve.settings.struct import ConfigStruct
from pdserve.shared.errors import ConfigError
from pdserve.shared.hints.commands import SETTINGS
from tests.matrix import matrix


class Inner(ConfigStruct, frozen=True):
    kv_memory: Annotated[str, Meta(description="100% of it")] = "1MiB"
    is_fast: Annotated[bool, Meta(description="or slow")] = True


class Outer(ConfigStruct, frozen=True):
    count: Annotated[int, Meta(ge=1, description="how many")] = 3
    wait_s: float = 0.5
    mode: Literal["a", "b"] = "a"
    names: list[str] = msgspec.field(default_factory=list)
    commands: Annotated[list[str], Meta(extra=WHOLE)] = msgspec.field(default_factory=list)
    kinds: list[Literal["x", "y"]] = msgspec.field(default_factory=lambda: ["x"])
    revision: str | None = None
    inner: Inner = Inner()


def read(struct: type[ConfigStruct], *words: str) -> ConfigStruct:
    parser = FlagParser(prog="test")
    add_flags(parser, struct)
    return config_from(struct, parser.parse_args(words))


def test_no_flag_gives_the_defaults():
    assert read(Outer) == Outer()


def test_every_kind_of_flag():
    words = [
        "--count=7",
        "--wait-s=2",
        "--mode=b",
        "--revision=null",
        "--kv-memory=2GiB",
        "--no-is-fast",
    ]
    assert read(Outer, *words) == Outer(
        count=7, wait_s=2.0, mode="b", revision="null", inner=Inner(kv_memory="2GiB", is_fast=False)
    )


def test_a_list_is_repeated_or_written_with_commas():
    assert read(Outer, "--names=a,b", "--names", "c") == Outer(names=["a", "b", "c"])


def test_a_list_of_whole_words_keeps_its_commas():
    config = Outer(commands=["a --b {1,2}", " c"])
    assert read(Outer, "--commands=a --b {1,2}", "--commands", " c") == config
    assert read(Outer, *as_flags(config)) == config


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("--count=0", 'argument --count: "0": Expected `int` >= 1'),
        ("--count=x", 'argument --count: "x": Expected `int`'),
        ("--mode=c", 'argument --mode: "c": choose from a, b'),
        ("--kinds=x,z", 'argument --kinds: "x,z": choose from x, y'),
        ("--kv-mem=1", "there is no flag --kv-mem: did you mean --kv-memory?"),
    ],
)
def test_a_wrong_flag_is_told_in_one_line_with_exit_code_2(word, complaint, capsys):
    with pytest.raises(SystemExit) as info:
        read(Outer, word)
    assert info.value.code == 2
    assert capsys.readouterr().err == f"test: error: {complaint} (see test --help)\n".replace(
        "Expected `int` (", "Expected `int`, got `str` ("
    )


def test_help_has_groups_choices_and_defaults(capsys):
    with pytest.raises(SystemExit):
        read(Outer, "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--count COUNT how many (default: 3)" in text
    assert "inner: --kv-memory MEMORY 100% of it (default: 1MiB)" in text
    assert "--is-fast, --no-is-fast or slow (default: on)" in text
    assert "--mode {a,b}" in text


def test_flags_come_on_top_of_the_file_and_only_those_given(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('count = 5\nmode = "b"\n[inner]\nkv_memory = "9MiB"\nis_fast = false\n')
    config = read(Outer, f"--config={file}", "--mode=a", "--kv-memory=3MiB")
    assert config == Outer(count=5, mode="a", inner=Inner(kv_memory="3MiB", is_fast=False))


@pytest.mark.parametrize(
    ("toml", "complaint"),
    [
        ("cuont = 5", "no setting `cuont`; did you mean `count`?"),
        ("[inner]\nkv_mem = 1", "no setting `inner.kv_mem`; did you mean `inner.kv_memory`?"),
        ("[other]\ncount = 1", "no setting `other.count`; did you mean `count`?"),
        ("[iner]\nxyz = 1", r"no section \[iner\]; did you mean `inner`\?"),
        ("[model]\npath = 1", r"no section \[model\], only inner"),
        ("inner = 1", r"`inner` is a section: write \[inner\]"),
        ("[security]\ntls_dir = 1", "pdserve coordinator, prefill and decode have it"),
        ('node_id = "a"', "pdserve prefill and decode have it"),
        ("count = 0", "count: Expected `int` >= 1"),
        ('count = "7"', "count: Expected `int`, got `str`"),
        ("count = ", "cannot read the config file"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, toml, complaint):
    file = tmp_path / "c.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError, match=complaint) as info:
        read(Outer, f"--config={file}")
    assert str(file) in str(info.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read(Outer, f"--config={tmp_path / 'none.toml'}")


@pytest.mark.parametrize(
    "config",
    [
        Outer(),
        Outer(count=9, wait_s=0.1 + 0.2, names=["a", "-b"], inner=Inner(is_fast=False)),
        Outer(revision="--main", mode="b", kinds=["y", "x"]),
    ],
)
def test_as_flags_is_the_inverse_of_reading(config):
    assert read(Outer, *as_flags(config)) == config


@pytest.mark.parametrize("struct", [NodeConfig, CoordinatorConfig, ClusterConfig])
def test_every_real_config_makes_flags_with_help(struct):
    assert all(flag.description for flag in settings_of(struct))
    assert read(struct) == struct()


@pytest.mark.parametrize("struct", [NodeConfig, CoordinatorConfig, ClusterConfig])
def test_reports_must_come_more_often_than_nodes_are_given_up(struct):
    words = ["--set", "timeouts.heartbeat_s=2", "--set=timeouts.liveness_s=3"]
    assert read(struct, *words).timeouts.liveness_s == 3
    with pytest.raises(ConfigError, match=r"`heartbeat_s` is 10, but must be less than .*\(2\)"):
        read(struct, "--set=timeouts.heartbeat_s=10")


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e300", "0", "-1"])
def test_a_deadline_is_a_number_that_timers_can_count(seconds, capsys):
    with pytest.raises(SystemExit):
        read(CoordinatorConfig, f"--set=timeouts.liveness_s={seconds}")
    said = capsys.readouterr().err
    assert f'argument --set: "timeouts.liveness_s={seconds}": Expected `float` ' in said


def test_any_setting_can_be_set_and_the_last_one_counts():
    words = ["--set=engine.prefix_cache=false", "--set=engine.kv_memory=2GiB", "--kv-memory=3GiB"]
    config = read(NodeConfig, *words, "--set=transports=shm,tcp", "--transports=ucx")
    assert config.engine == EngineConfig(prefix_cache=False, kv_memory="3GiB")
    assert config.transports == ["shm", "tcp", "ucx"]


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("--watermark=0", "--watermark is no flag: use --set policy.watermark=0 or the file"),
        ("--no-prefix-cache", "--no-prefix-cache is no flag: use --set engine.prefix_cache=false"),
        ("--set=policy.watermrk=0", "no setting `policy.watermrk`; did you mean `policy.watermark"),
        ("--set=watermark=0", "no setting `watermark`; did you mean `policy.watermark`?"),
        ("--set=qqq=9", "there is no setting `qqq` (see"),
        ("--set=policy.watermark", "write it as policy.watermark=VALUE"),
        ("--set=policy.watermark=2", 'argument --set: "policy.watermark=2": Expected `float` < 1'),
    ],
)
def test_what_cannot_be_set_is_told_with_what_can(word, complaint, capsys):
    with pytest.raises(SystemExit) as info:
        read(NodeConfig, word)
    assert info.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    matrix(
        [
            (
                "serve Qwen/Qwen3-0.6B",
                'there is no command "serve": pdserve up --model MODEL serves',
            ),
            ("statsu", 'there is no command "statsu": did you mean `status`? (see pdserve --help)'),
            ("bench decode", 'pdserve bench: error: there is no command "decode": '),
            (
                "config prefil",
                'pdserve config: error: there is no command "prefil": did you mean `pre',
            ),
            (
                "up Qwen/Qwen3",
                '"Qwen/Qwen3" is not expected here; the model is named by --model Qwen',
            ),
            ("up --prot 1", "pdserve up: error: there is no flag --prot: did you mean --port"),
            ("up --tensor-parallel 2", "flag of pdserve prefill and pdserve decode"),
            (
                "up --tensor-parallel 2",
                "use --set engine.tensor_parallel=2 or the file (see pdserve",
            ),
            (
                "up --node-id=a",
                "--node-id is a flag of pdserve prefill and pdserve decode, not of pds",
            ),
            ("decode --ctx-size 9", "there is no --ctx-size: here it is --max-model-len"),
            ("up --tp 2", "there is no --tp: here it is the setting engine.tensor_parallel"),
            (
                "up --trust-remote-code",
                "no flag --trust-remote-code: no code of checkpoints is run",
            ),
            ("kv --xyzzy", "there is no flag --xyzzy (see pdserve kv --help)"),
        ],
        4,
    ),
)
def test_what_a_command_does_not_know_is_told_with_what_is_meant(words, complaint, capsys):
    with pytest.raises(SystemExit) as info:
        build_parser().parse_args(words.split())
    assert info.value.code == 2
    assert complaint in capsys.readouterr().err


def test_what_flags_of_others_stand_for_are_settings():
    known = {
        setting.option
        for struct in (ClusterConfig, CoordinatorConfig, NodeConfig)
        for setting in settings_of(struct)
    }
    meant = {"--" + name.replace("_", "-") for name in SETTINGS.values()}
    assert meant <= known


@pytest.mark.parametrize("command", ["up", "coordinator", "prefill", "decode"])
def test_a_command_shows_at_most_25_options_with_help(command, capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert 20 <= sum(line.startswith("  -") for line in lines) <= 25


@pytest.mark.parametrize("struct", [NodeConfig, CoordinatorConfig, ClusterConfig])
def test_every_shown_flag_is_a_setting_named_once(struct):
    shown = [name for names in (struct.flag_groups or {}).values() for name in names]
    assert len(shown) == len(set(shown))
    assert set(shown) <= {setting.flag for setting in settings_of(struct)}


def test_two_fields_of_one_name_are_refused():
    class Doubled(ConfigStruct, frozen=True):
        kv_memory: str = ""
        inner: Inner = Inner()

    with pytest.raises(TypeError, match="the same flag"):
        settings_of(Doubled)


def test_a_section_whose_default_is_not_its_own_is_refused():
    class Odd(ConfigStruct, frozen=True):
        engine: EngineConfig = EngineConfig(block_size=8)

    with pytest.raises(TypeError, match=r"engine: the default must be EngineConfig\(\)"):
        settings_of(Odd)
