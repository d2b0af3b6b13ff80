"""What a report says of the code that was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pdserve.commands.cli.conditions import revision


def test_a_source_tree_has_a_revision_and_says_that_it_was_changed(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    clean = revision(tmp_path / "file")
    assert len(clean) == 12
    (tmp_path / "file").write_text("two")
    assert revision(tmp_path / "file") == f"{clean}-dirty"


def test_an_installed_package_has_none_even_inside_a_repository(tmp_path: Path) -> None:
    subprocess.run(["git", "init"], cwd=tmp_path, check=True, capture_output=True)
    installed = tmp_path / ".venv" / "setup.py"
    installed.parent.mkdir()
    installed.touch()
    assert revision(installed) == revision(tmp_path / "nowhere" / "setup.py") == ""
