"""A database server for the modules that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres import Postgres, find_program, running_postgres


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """A server with empty databases."""
    if find_program("initdb") is None:
        pytest.skip("there is no PostgreSQL server here: install Debian's postgresql")
    with running_postgres() as server:
        yield server
