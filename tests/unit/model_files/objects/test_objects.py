"""Models in object stores: fetched once, whole, as they are there, from a server that is bad."""

from __future__ import annotations

import hashlib
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.model_files.checkpoint import Checkpoint, resolve_checkpoint
from pdserve.model_files.objects import download, opening, snapshot
from pdserve.shared.errors import ConfigError, ModelError
from pdserve.shared.process.may_pass import NotNow
from tests.matrix import matrix
from tests.object_server import BUCKET, BadServer, running, s3_server

pytest.importorskip("obstore", reason="the objects extra is not installed")

WEIGHTS = "model.safetensors"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "PAUSES_S", (0.0,) * 5)
    return tmp_path / "cache" / "pdserve" / "models"


@pytest.fixture(params=matrix(["https", "s3", "gs"], 1))
def server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> Iterator[BadServer]:
    """With a model at `url_of`: a plain one, or an S3 server, whose start takes seconds."""
    if request.param != "https":
        pytest.importorskip("moto", reason="the test extra is not installed")
    with running(BadServer()) if request.param == "https" else s3_server(monkeypatch) as server:
        server.scheme = request.param
        server.put_folder(CHECKPOINT_PATH, "models/demo")
        yield server


def url_of(server: BadServer, name: str = "demo") -> str:
    start = f"{server.url}/" if server.scheme == "https" else f"{server.scheme}://"
    return f"{start}{BUCKET}/models/{name}"


def assert_whole(found: Checkpoint) -> None:
    assert found.model_id == "demo"
    for name in ("config.json", "tokenizer.json", WEIGHTS):
        assert (found.path / name).read_bytes() == (CHECKPOINT_PATH / name).read_bytes()


def sums_of(folder: Path) -> bytes:
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
        for file in sorted(folder.iterdir())
        if file.is_file()
    ]
    return "".join(lines).encode()


def test_a_model_is_fetched_once(server: BadServer) -> None:
    found = resolve_checkpoint(url_of(server))
    assert_whole(found)
    assert resolve_checkpoint(url_of(server) + "/") == found
    assert server.num_gets(WEIGHTS) == 1
    without = resolve_checkpoint(url_of(server), with_weights=False)
    assert not (without.path / WEIGHTS).exists()
    assert without.revision != found.revision


def test_processes_that_start_together_fetch_once(server: BadServer) -> None:
    found: list[Checkpoint] = []
    url = url_of(server)
    threads = [
        threading.Thread(target=lambda: found.append(resolve_checkpoint(url))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    assert len({one.revision for one in found}) == 1
    assert server.num_gets(WEIGHTS) == 1


def test_what_breaks_off_goes_on_where_it_was(server: BadServer) -> None:
    server.most_bytes = 1 << 20  # of 4 MB
    assert_whole(resolve_checkpoint(url_of(server)))
    size = (CHECKPOINT_PATH / WEIGHTS).stat().st_size
    assert size >> 20 <= server.num_gets(WEIGHTS) <= 3 * (size >> 20)


@pytest.mark.long
def test_a_server_that_falls_silent_is_asked_again(
    server: BadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "SILENCE_S", 3)
    server.most_bytes, server.num_silent = 3 << 20, 1
    try:
        assert_whole(resolve_checkpoint(url_of(server)))
    finally:
        server.is_over.set()
    assert server.num_gets(WEIGHTS) >= 2
    assert 0 < server.starts[-1] <= 3 << 20, "it goes on where it was"


def test_the_next_process_goes_on_where_one_ended(
    server: BadServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "CHUNK", 1 << 16)
    resolve_checkpoint(url_of(server), with_weights=False)
    server.most_bytes, server.most_gets = 1 << 20, 2
    with pytest.raises(NotNow, match=r"breaks off after \d{6,7} of"):
        resolve_checkpoint(url_of(server))
    (part,) = cache.rglob("*.part")
    num_begun = part.stat().st_size
    assert num_begun >= 1 << 20
    server.most_bytes = server.most_gets = None
    server.starts.clear()
    assert_whole(resolve_checkpoint(url_of(server)))
    assert server.starts == [num_begun]


def test_a_server_that_always_breaks_off_is_given_up(server: BadServer) -> None:
    server.most_bytes = 0
    with pytest.raises(NotNow, match=r"breaks off after 0 of"):
        resolve_checkpoint(url_of(server))


def test_damage_is_found_by_its_sums(server: BadServer) -> None:
    server.put("models/demo/SHA256SUMS", sums_of(CHECKPOINT_PATH))
    found = resolve_checkpoint(url_of(server))
    good = (CHECKPOINT_PATH / WEIGHTS).read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 3] ^= 1
    server.put(f"models/demo/{WEIGHTS}", bytes(bad))
    with pytest.raises(ModelError, match=rf"{WEIGHTS} is damaged: its SHA-256 is") as told:
        resolve_checkpoint(url_of(server))
    assert "\n" not in str(told.value)
    server.put(f"models/demo/{WEIGHTS}", good)
    assert resolve_checkpoint(url_of(server)) == found


def test_another_version_has_another_digest(server: BadServer) -> None:
    found = resolve_checkpoint(url_of(server))
    changed = bytearray((CHECKPOINT_PATH / WEIGHTS).read_bytes())
    changed[-3] ^= 1  # within a tensor, where samples of it may not be
    server.put(f"models/demo/{WEIGHTS}", bytes(changed))
    assert resolve_checkpoint(url_of(server)).revision != found.revision


def test_without_its_store_a_model_that_is_here_is_used(
    server: BadServer, caplog: pytest.LogCaptureFixture
) -> None:
    found = resolve_checkpoint(url_of(server))
    server.is_down = True
    assert resolve_checkpoint(url_of(server)) == found
    assert "what was fetched last is used" in caplog.text
    with pytest.raises(NotNow, match="cannot be read now") as told:
        resolve_checkpoint(url_of(server, "other"))
    assert "\n" not in str(told.value)


def test_there_must_be_room(
    server: BadServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_checkpoint(url_of(server))
    (former,) = cache.iterdir()
    server.put_folder(CHECKPOINT_PATH, "models/next")
    usage, num_free = namedtuple("usage", "total free"), [1 << 20, 1 << 30]
    monkeypatch.setattr(
        snapshot.shutil,
        "disk_usage",
        lambda _: usage(0, num_free[not (former / "blobs").exists()]),
    )
    found = resolve_checkpoint(url_of(server, "next"))
    assert (found.path / WEIGHTS).exists()
    assert not (former / "snapshots").exists()
    num_free[:] = [0, 0]
    server.put_folder(CHECKPOINT_PATH, "models/last")
    with pytest.raises(NotNow, match=r"are to be fetched, and .* room for 0"):
        resolve_checkpoint(url_of(server, "last"))


def test_what_is_not_there_is_said(server: BadServer) -> None:
    with pytest.raises(ConfigError, match="has no file of a model"):
        resolve_checkpoint(url_of(server, "none"))


@pytest.mark.parametrize(
    ("url", "said"),
    [("s3:///models", "is no address"), ("http://example.org/model", "so use https://")],
)
def test_what_is_no_address_is_said(cache: Path, url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_checkpoint(url)


def test_a_revision_is_not_for_object_stores(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"hold .* by its digest"):
        resolve_checkpoint("s3://bucket/models/demo", "main")
