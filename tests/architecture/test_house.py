"""`make house` counts what is there: checked on a repository of four files."""

import subprocess
import sys

from tests.architecture.repository import ROOT
from tools.house.__main__ import documents_report, report
from tools.house.documents import read_documents
from tools.house.files import read_files

FILES = {
    "pdserve/one.py": "import os\n\nclass Room:\n    def go(self, far):\n        return far\n",
    "pdserve/commands/bench/two.py": "class Room: ...\n",
    "tests/node.py": "def patch(monkeypatch):\n    monkeypatch.setattr('a', 1)\n",
    "tests/fakes/clock.py": "from pdserve import _native\nfrom pdserve.one import Room, _go\n",
    "pdserve/wire/made_pb2.py": "generated = 1\n",
}


def test_figures_of_a_small_repository(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    lines = {" ".join(line.split()) for line in report(read_files(tmp_path))}
    assert {
        "2 pdserve/one.py: go",
        "1 pdserve/one.py: go",
        "Room: pdserve/commands/bench/two.py, pdserve/one.py",
        "serving 1 files 5 lines",
        "benchmarks 1 files 1 lines",
        "tests 2 files 4 lines",
        "helpers of tests 2 files 4 lines",
        "fakes 1 files 2 lines",
        "private imports 1 in helpers of tests",
        "import share 20.0% of the product's lines that are not blank",
        "monkeypatch.setattr 1 in tests",
    } <= lines


def test_helpers_of_tests_import_no_private_names():
    helpers = [file for file in read_files(ROOT) if file.is_test_helper]
    assert helpers
    found = {str(file.path): [*file.private_imports()] for file in helpers}
    assert {path: names for path, names in found.items() if names} == {}


def test_words_and_sentences_of_documents(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Rooms\n\nOne is *small*. The other one is large.\n")
    (tmp_path / "docs/ROOMS.md").write_text(
        "* A list.\n* Of two rooms\n\n```sh\na b c d e f\n```\n"
    )
    lines = {" ".join(line.split()) for line in documents_report(read_documents(tmp_path))}
    assert {"10 README.md", "15 docs/ROOMS.md", "words together 25"} <= lines
    assert {"5 README.md: The other one is large.", "3 docs/ROOMS.md: Of two rooms"} <= lines


def test_processes_note_what_they_enter_between_two_signals(tmp_path):
    program = (
        "import os, signal, shlex, textwrap\n"
        "shlex.quote('before')\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "textwrap.dedent('between')\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "print(open(f'{os.environ[\"HOUSE_ENTERED\"]}/{os.getpid()}').read())\n"
    )
    environment = {"PYTHONPATH": str(ROOT / "tools/house/entered"), "HOUSE_ENTERED": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert "textwrap.py" in ran.stdout
    assert "shlex.py" not in ran.stdout
