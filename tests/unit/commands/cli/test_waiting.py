import asyncio
import shlex

import pytest
from msgspec.structs import replace

from pdserve.commands.cli.starting.up_screen import UpScreen, invitation, waiting_text
from pdserve.commands.cli.up import tell
from pdserve.model_files.hub import downloaded_bytes
from pdserve.protocol.status import ClusterStatus, NodeStatus
from tests.unit.commands.cli.doctor.statuses import HEALTHY
from tests.unit.commands.cli.doctor.statuses import node as healthy


def node(name: str, **changes: object) -> NodeStatus:
    return replace(healthy(name), **changes)


def cluster(*nodes: NodeStatus) -> ClusterStatus:
    return replace(HEALTHY, nodes=[*nodes])


NAMES = ["prefill-0", "decode-0"]


def test_what_is_awaited_is_what_each_process_does():
    assert waiting_text(NAMES, None) == (
        "waiting for coordinator (importing), prefill-0 (importing), decode-0 (importing)"
    )
    loading = cluster(node("prefill-0", state="loading", loading_progress=0.43))
    assert waiting_text(NAMES, loading, 812_000_000) == (
        "waiting for prefill-0 (loading, 43%), decode-0 (downloading, 812 MB so far)"
    )
    measuring = cluster(node("prefill-0", state="loading", loading_progress=1.0))
    assert waiting_text(["prefill-0"], measuring) == "waiting for prefill-0 (measuring its steps)"
    assert waiting_text(["prefill-0"], cluster(node("prefill-0"))) == ""


@pytest.mark.parametrize("needs_key", [False, True])
def test_the_example_has_a_key_where_one_is_needed_and_does_not_show_it(needs_key):
    *_, command = invitation("http://h:8000", HEALTHY, needs_key=needs_key).strip().splitlines()
    words = shlex.split(command)
    assert words[:3] == ["curl", "-N", "http://h:8000/v1/chat/completions"]
    assert ("Authorization: Bearer $PDSERVE_API_KEY" in words) == needs_key


async def test_it_is_told_again_and_again_until_all_are_ready(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    log = tmp_path / "log"
    with log.open("wb") as file:
        screen = UpScreen(stderr=file.fileno())
        with screen.loading(NAMES) as bars:
            telling = asyncio.create_task(tell(bars, "", 0.001))
            while log.read_text().count("decode-0 (importing)") < 3:
                await asyncio.sleep(0)
            telling.cancel()
            bars.show(cluster(node("prefill-0"), node("decode-0")))
            bars.tell(0)
    assert "waiting for coordinator (importing)" in log.read_text()
    assert log.read_text().splitlines()[-1].endswith("| ready")


@pytest.mark.parametrize(("blobs", "total"), [({"a": 3, "b.x.incomplete": 4}, 7), ({"a": 3}, 0)])
def test_a_download_is_what_the_hubs_cache_has_so_far(blobs, total, tmp_path):
    folder = tmp_path / "models--org--name" / "blobs"
    folder.mkdir(parents=True)
    for name, size in blobs.items():
        (folder / name).write_bytes(bytes(size))
    assert downloaded_bytes("org/name", tmp_path) == total
