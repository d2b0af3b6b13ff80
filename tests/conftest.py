"""One event loop and one shared cluster for everything that tests real processes."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import certifi
import pytest
import pytest_asyncio
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from pdserve.commands.cluster.placement import GPU_SIGNS

if TYPE_CHECKING:  # the unit tests need none of it
    from tests.cluster.client import Client
    from tests.cluster.fleet import Fleet
    from tests.postgres import Postgres

# Without a GPU our Triton kernels are interpreted. Triton looks when it is imported, by whomever.
if not any(sign.exists() for sign in GPU_SIGNS):
    os.environ["TRITON_INTERPRET"] = "1"

# On a busy machine any example can take longer than hypothesis's deadline of 200 ms.
settings.register_profile("many", settings.default, deadline=None)
settings.register_profile("few", settings.default, deadline=None, max_examples=15, derandomize=True)
settings.load_profile("many")

MAX_INFLIGHT = 64  # requests that the shared cluster takes
LONG_S = 1200  # until a long test hangs: some compute for a minute, if the machine is theirs alone


def pytest_configure(config: pytest.Config) -> None:
    """`make test` tries fewer examples than `make test-long`, and the same each time."""
    if config.option.markexpr == "not long":
        settings.load_profile("few")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, bool | None, bool | None]:
    """Nothing of what is imported and collected goes: to look for it was a sixth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A cluster lives as long as the event loop that started it: these tests share one.

    And long tests have more time, unless they say themselves how much.
    """
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_S))
        if _has_processes(item.nodeid) and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


def pytest_collection_finish() -> None:
    """Collections leave alone what is loaded now: that of 8,000 tests takes a quarter of a second.

    Many tests ask for one, and the collector itself has them all the time.
    """
    gc.collect()
    gc.freeze()


class _Workers(LoadScopeScheduling):
    """pytest-xdist's: what shares a module's fixtures stays together, and so do all clusters.

    And so do those who read the whole source tree.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/architecture/"):
            return "sources"
        return "processes" if _has_processes(nodeid) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Workers:
    """How tests are shared out to workers, where there are any."""
    return _Workers(config, log)


def _has_processes(nodeid: str) -> bool:
    return nodeid.startswith(("tests/cluster/", "tests/faults/"))


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """HTTP clients know one certificate: to read the usual 140 takes each of them a tenth of a s.

    Tests reach nobody whom these have signed.
    """
    file = tmp_path_factory.mktemp("authority") / "ca.crt"
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    file.write_text(first + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nodes leave their profiles here and not with the user; later ones start from them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def collector_off() -> Iterator[None]:
    """gc.collect() counts what the test itself has left in cycles."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model, with room for long prompts."""
    from tests.cluster.checkpoints import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"), max_model_len=32768)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_fleet(tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    """A prefill node and two decode nodes, the second one with other blocks and only over TCP."""
    from tests.cluster.fleet import Fleet, fleet_config, running

    config = fleet_config(
        tiny_checkpoint, decode=2, max_inflight=MAX_INFLIGHT, engine={"token_budget": 37}
    )
    fleet = Fleet(config, {"decode-1": ["--set=engine.block_size=8", "--transports=tcp"]})
    async with running(fleet):
        yield fleet


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(shared_fleet: Fleet) -> AsyncIterator[Fleet]:
    """The shared cluster, which has to be as good as new before and after the test."""
    await shared_fleet.assert_baseline()
    yield shared_fleet
    await shared_fleet.assert_baseline()


@pytest_asyncio.fixture(loop_scope="session")
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    """A client of the shared cluster."""
    from tests.cluster.client import Client

    async with Client(fleet.url) as client:
        yield client


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A database server; who kills it starts it again."""
    from tests.postgres import find_program, running_postgres

    if find_program("initdb") is None:
        pytest.skip("there is no PostgreSQL server here: install Debian's postgresql")
    with running_postgres() as server:
        yield server
