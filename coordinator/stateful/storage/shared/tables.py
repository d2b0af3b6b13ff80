"""The tables, and the statements on them. Times are the database's own."""

from __future__ import annotations

from typing import Final

VERSION: Final = 1  # of the schema; others are refused
LOCK: Final = 0x70647365  # of the schema while it is made, and of the one that trims
CHANNEL: Final = "pdserve"  # on which coordinators tell each other which entries have changed

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS pdserve_schema (version integer NOT NULL);
CREATE TABLE IF NOT EXISTS pdserve_coordinators (
    id text PRIMARY KEY,
    lives_until timestamptz NOT NULL
);
CREATE SEQUENCE IF NOT EXISTS pdserve_versions;
CREATE TABLE IF NOT EXISTS pdserve_entries (
    owner text, id text,
    version bigint NOT NULL DEFAULT nextval('pdserve_versions'),
    entry bytea NOT NULL,
    used_at timestamptz NOT NULL DEFAULT now(),
    maker text,           -- the coordinator that makes this response in the background
    is_stopped boolean NOT NULL DEFAULT false,  -- the maker is to stop
    PRIMARY KEY (owner, id)
);
CREATE INDEX IF NOT EXISTS pdserve_made ON pdserve_entries (maker) WHERE maker IS NOT NULL;
CREATE TABLE IF NOT EXISTS pdserve_events (
    owner text, id text,
    run integer,          -- a response that is begun again has its events anew
    first integer,        -- number of the first of these events
    events bytea[] NOT NULL,
    PRIMARY KEY (owner, id, run, first),
    FOREIGN KEY (owner, id) REFERENCES pdserve_entries ON DELETE CASCADE
);
"""

INSERT: Final = """
INSERT INTO pdserve_entries (owner, id, entry, maker) VALUES ($1, $2, $3, $4)
ON CONFLICT (owner, id) DO UPDATE SET
    entry = excluded.entry, maker = excluded.maker, is_stopped = false, used_at = now(),
    version = nextval('pdserve_versions')
RETURNING version
"""
# Of a response: by its maker, unless it was deleted, or is made by another one now.
FINISH: Final = """
UPDATE pdserve_entries SET
    entry = $3, maker = $4, used_at = now(), version = nextval('pdserve_versions')
WHERE owner = $1 AND id = $2 AND maker = $5
RETURNING version
"""
# Of a conversation, if it is as it was known.
REPLACE: Final = """
UPDATE pdserve_entries SET entry = $3, used_at = now(), version = nextval('pdserve_versions')
WHERE owner = $1 AND id = $2 AND ($4::bigint IS NULL OR version = $4)
RETURNING version
"""
LOCK_ENTRY: Final = "SELECT entry FROM pdserve_entries WHERE owner = $1 AND id = $2 FOR UPDATE"
DELETE: Final = "DELETE FROM pdserve_entries WHERE owner = $1 AND id = $2"
ADD_EVENTS: Final = """
INSERT INTO pdserve_events (owner, id, run, first, events)
SELECT $1::text, $2::text, $3::integer, $4::integer, $5::bytea[] WHERE EXISTS (
    SELECT FROM pdserve_entries WHERE owner = $1 AND id = $2 AND maker = $6
) ON CONFLICT DO NOTHING
"""

# An entry is sent only if it is not the known version. `used_at` is not worth a write a read.
LOOK: Final = """
SELECT owner, id, e.version, CASE WHEN e.version IS DISTINCT FROM known.version THEN entry END,
    used_at < now() - interval '1 hour'
FROM unnest($1::text[], $2::text[], $3::bigint[]) AS known (owner, id, version)
LEFT JOIN pdserve_entries e USING (owner, id)
"""
TOUCH: Final = "UPDATE pdserve_entries SET used_at = now() WHERE owner = $1 AND id = $2"
EVENTS: Final = """
SELECT e.run, e.first, e.events FROM pdserve_events e
WHERE owner = $1 AND id = $2 AND run >= $3
    AND first + cardinality(events) > CASE run WHEN $3 THEN $4 ELSE 0 END
ORDER BY run, first
"""
IS_BEING_MADE: Final = "SELECT maker IS NOT NULL FROM pdserve_entries WHERE owner = $1 AND id = $2"

LIVE: Final = """
INSERT INTO pdserve_coordinators VALUES ($1, now() + $2)
ON CONFLICT (id) DO UPDATE SET lives_until = excluded.lives_until
"""
LEAVE: Final = "DELETE FROM pdserve_coordinators WHERE id = $1"
FORGET_DEAD: Final = """
DELETE FROM pdserve_coordinators WHERE lives_until < now() - interval '1 hour'
"""
MADE: Final = "SELECT owner, id, is_stopped FROM pdserve_entries WHERE maker = $1"
STOP: Final = """
UPDATE pdserve_entries SET is_stopped = true WHERE owner = $1 AND id = $2 AND maker IS NOT NULL
"""
CLAIM: Final = """
UPDATE pdserve_entries SET maker = $1, version = nextval('pdserve_versions')
WHERE (owner, id) IN (
    SELECT owner, id FROM pdserve_entries e WHERE maker IS NOT NULL AND NOT EXISTS (
        SELECT FROM pdserve_coordinators c WHERE c.id = e.maker AND lives_until > now()
    ) LIMIT 16 FOR UPDATE SKIP LOCKED
)
RETURNING owner, id, version, entry, is_stopped
"""

SIZE: Final = "SELECT count(*) AS number, coalesce(sum(length(entry)), 0) FROM pdserve_entries"
# Every owner keeps what it used last, up to a share of which none has more than it needs.
TRIM: Final = """
DELETE FROM pdserve_entries e USING (
    SELECT owner, id, row_number() OVER smallest AS number, sum(bytes) OVER smallest AS bytes FROM (
        SELECT owner, id, length(entry) AS bytes, greatest(
            row_number() OVER last / $1::float8, sum(length(entry)) OVER last / $2::float8
        ) AS part
        FROM pdserve_entries WINDOW last AS (PARTITION BY owner ORDER BY used_at DESC, id)
    ) shares WINDOW smallest AS (ORDER BY part, owner, id)
) ranked
WHERE e.owner = ranked.owner AND e.id = ranked.id AND e.maker IS NULL
    AND (ranked.number > $1 OR ranked.bytes > $2)
"""
NOTIFY: Final = f"SELECT pg_notify('{CHANNEL}', $1)"
