"""`pdserve store`: whose prefixes are where, and that they go when they are told to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kv_transfer.store.blobs import FolderBlobs
from kv_transfer.store.entry import Key, owner_name
from pdserve.commands.cli import store
from pdserve.shared.errors import ConfigError


def test_it_lists_and_erases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blobs = FolderBlobs(tmp_path)
    blobs.open()
    for number, owner in enumerate(["acme", "acme", "other", ""]):
        name = Key(owner_name(owner), "ab" * 16, number.to_bytes(16)).name
        blobs.write(name, np.zeros(1 << 20, dtype=np.uint8))
    assert store.run(str(tmp_path), None) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["(nobody)", "1", "1.0"], ["acme", "2", "2.0"], ["other", "1", "1.0"]]
    assert store.run(str(tmp_path), "acme") == 0
    assert store.run(str(tmp_path), "") == 0
    assert "acme" not in capsys.readouterr().out
    assert {blob.name.split("/")[0] for blob in blobs.blobs()} == {"erased", owner_name("other")}
    with pytest.raises(ConfigError, match="no folder"):
        store.run(str(tmp_path / "nowhere"), None)
