"""What fires each alert, by Prometheus' own tool for such tests."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import yaml

from tests.operations.promql import PROMETHEUS, rules

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian's package prometheus)"
)


@needs_promtool
@pytest.mark.parametrize(
    "command",
    [
        ["check", "rules", "recording.yml", "alerts.yml"],
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "alerts_test.yml"],
    ],
    ids=" ".join,
)
def test_promtool_agrees(command: list[str]) -> None:
    ran = subprocess.run(
        ["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=30
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_each_alert_is_fired_in_a_test() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules("alerts.yml")}
