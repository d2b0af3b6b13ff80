import sys

import pytest

from pdserve.commands.cli import demo
from pdserve.commands.cli.demo import PullMetrics, pulls_in
from pdserve.commands.cli.demo_config import DemoConfig
from pdserve.commands.cluster.scrape import parse
from pdserve.settings.config import CheckpointConfig
from pdserve.shared.errors import DeadlineExceeded
from pdserve.shared.process.exit_codes import StartFailed


def unchecked(*_: object) -> None:
    """These models are behaviours of the stand-ins."""


def test_the_demo_asks_shows_the_facts_and_stops_everything(fake_command, capsys):
    assert demo.run(DemoConfig(deadline_s=30.0), fake_command, unchecked) == 0
    out = capsys.readouterr().out
    assert out.startswith("fake-model on a coordinator, a prefill node and a decode node at http:")
    assert out.count("A fake answer.") == len(DemoConfig().prompts)
    assert "5 + 3 tokens | prefilled on prefill-0, decoded on decode-0]" in out
    assert "decode-0 pulled 2048 KiB of KV in 3 pulls (1.5 ms)" in out
    assert out.endswith("everything is stopped again\n")


@pytest.mark.long
def test_one_prompt_of_ones_own(fake_command, capsys):
    config = DemoConfig(prompt="Why, though?", deadline_s=30.0)
    assert demo.run(config, fake_command, unchecked) == 0
    assert capsys.readouterr().out.count("> ") == 1


@pytest.mark.long
def test_a_cluster_that_does_not_start_shows_what_its_processes_wrote(fake_command, capfd):
    config = DemoConfig(checkpoint=CheckpointConfig(model="bad"), deadline_s=30.0)
    with pytest.raises(StartFailed, match="no checkpoint at bad"):
        demo.run(config, fake_command, unchecked)
    assert "coordinator | the fake coordinator listens" in capfd.readouterr().err


@pytest.mark.long
def test_the_deadline_is_for_all_of_it(fake_command):
    config = DemoConfig(checkpoint=CheckpointConfig(model="stuck"), deadline_s=1.0)
    with pytest.raises((DeadlineExceeded, StartFailed), match="1 s"):
        demo.run(config, fake_command, unchecked)


def test_processes_that_end_badly_when_stopped_are_a_failure(capsys):
    command = (sys.executable, "-c", "raise SystemExit(5)")
    with pytest.raises(StartFailed) as info:
        demo.run(DemoConfig(deadline_s=30.0), command, unchecked)
    assert info.value.exit_code == 5


def test_pulls_are_read_from_the_metrics():
    text = (
        "pdserve_pulls_total 3.0\npdserve_pulled_bytes_total 4096.0\n"
        "pdserve_pull_seconds_total 0.5\nother 1.0\n"
    )
    assert pulls_in(parse(text)) == PullMetrics(num_pulls=3, num_bytes=4096, seconds=0.5)
    assert pulls_in(parse("")) == PullMetrics(0, 0, 0.0)
