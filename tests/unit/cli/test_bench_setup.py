"""What a report says of the code that was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pdserve.cli.bench.setup import revision


def test_a_source_tree_has_a_revision_and_says_that_it_was_changed(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    clean = revision(tmp_path)
    assert len(clean) == 12
    (tmp_path / "file").write_text("two")
    assert revision(tmp_path) == f"{clean}-dirty"


def test_an_installed_package_has_none(tmp_path: Path) -> None:
    assert revision(tmp_path / "nowhere") == ""
