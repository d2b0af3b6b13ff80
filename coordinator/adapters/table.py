"""The names of adapters in the database, for the next process and for other coordinators."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from coordinator.adapters.known import Version
from coordinator.jobs.storage.database import Database

SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS pdserve_adapters (
        model text NOT NULL, name text NOT NULL, path text NOT NULL, digest text NOT NULL,
        bytes bigint NOT NULL, owner text NOT NULL, created_at bigint NOT NULL,
        invocation text NOT NULL, PRIMARY KEY (model, name)
    )""",
)
_ALL: Final = """
SELECT name, path, digest, bytes, owner, created_at, invocation FROM pdserve_adapters
WHERE model = ?
ORDER BY created_at, name
"""
_PUT: Final = """
INSERT INTO pdserve_adapters VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (model, name) DO NOTHING RETURNING name
"""
_DROP: Final = "DELETE FROM pdserve_adapters WHERE model = ? AND name = ?"
_DROP_OWN: Final = f"{_DROP} AND owner = ?"


class AdapterTable:
    """The adapters of one model."""

    def __init__(self, database: Database, model: str) -> None:
        self._database = database
        self._model = model

    @property
    def is_shared(self) -> bool:
        """Whether other coordinators may write to it."""
        return self._database.is_shared

    async def all(self) -> list[Version]:
        """Return all of them. Raises StoreUnavailable."""
        (rows,) = await self._database.run((_ALL, self._model))
        return [replace(Version(*row[:-1]), invocation=tuple(json.loads(row[-1]))) for row in rows]

    async def put(self, version: Version, *, in_place: bool, own_only: bool) -> bool:
        """Write what a name stands for; False: it stands for something, and may not be replaced.

        `own_only`: `in_place` replaces only what the same tenant has loaded.

        Raises StoreUnavailable.
        """
        key = self._model, version.name
        put = (
            _PUT,
            *key,
            version.path,
            version.digest,
            version.num_bytes,
            version.owner,
            version.created,
            json.dumps(version.invocation),
        )
        drop = (_DROP_OWN, *key, version.owner) if own_only else (_DROP, *key)
        steps = [drop, put] if in_place else [put]
        return bool((await self._database.run(*steps))[-1])

    async def drop(self, name: str) -> None:
        """Delete a name. Raises StoreUnavailable."""
        await self._database.run((_DROP, self._model, name))
