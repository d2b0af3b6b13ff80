"""Who may import whom: `.importlinter` holds, and says something about everybody."""

import configparser
import re
import subprocess
import sys

import pytest

from tests.architecture.repository import PACKAGES, ROOT, run


def test_the_contracts_hold():
    run(sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()")


def test_every_package_has_its_floor():
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    floors = set(re.findall(r"[\w.]+", contracts["importlinter:contract:floors"]["layers"]))
    inside = {"pdserve", "pdserve.commands", "pdserve.shared"}  # their parts have floors
    parts = {
        f"{package}.{path.stem}"
        for package in inside
        for path in ROOT.joinpath(*package.split(".")).iterdir()
        if (path.suffix == ".py" and path.stem not in ("__init__", "__main__"))
        or (path / "__init__.py").is_file()
    }
    assert (set(PACKAGES) | parts) - inside - floors == set()


@pytest.mark.parametrize(
    "module", ["coordinator.main", "pdserve.commands.cli.main", "pdserve.wire.channel"]
)
def test_torch_is_not_loaded(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert ran.returncode == 0
