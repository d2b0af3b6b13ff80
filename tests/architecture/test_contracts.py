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
    parts = {
        f"pdserve.{path.stem}"
        for path in (ROOT / "pdserve").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert (set(PACKAGES) | parts) - {"pdserve", "pdserve.__init__"} - floors == set()


@pytest.mark.parametrize("module", ["coordinator.main", "pdserve.cli.main", "pdserve.wire.channel"])
def test_torch_is_not_loaded(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert ran.returncode == 0
