"""The tables, and the statements on them. Times are the database's own."""

from __future__ import annotations

from typing import Final

VERSION: Final = 2  # of the schema; older ones are taken over, newer ones refused
LOCK: Final = 0x70647365  # of the schema while it is made, and of the one that trims
CHANNEL: Final = "pdserve"  # on which coordinators tell each other which entries have changed

VERSIONS: Final = "CREATE TABLE IF NOT EXISTS pdserve_schema (version integer NOT NULL)"
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS pdserve_coordinators (
    id text PRIMARY KEY,
    lives_until timestamptz NOT NULL
);
CREATE SEQUENCE IF NOT EXISTS pdserve_versions;
CREATE TABLE IF NOT EXISTS pdserve_entries (
    owner text, id text,
    version bigint NOT NULL DEFAULT nextval('pdserve_versions'),
    packed bytea NOT NULL,  -- of a conversation, without its items
    items_bytes bigint NOT NULL DEFAULT 0,
    used_at timestamptz NOT NULL DEFAULT now(),
    maker text,           -- the coordinator that makes this response in the background
    is_stopped boolean NOT NULL DEFAULT false,  -- the maker is to stop
    PRIMARY KEY (owner, id)
);
CREATE INDEX IF NOT EXISTS pdserve_made ON pdserve_entries (maker) WHERE maker IS NOT NULL;
CREATE TABLE IF NOT EXISTS pdserve_items (
    owner text, id text,  -- of the conversation
    seq bigint GENERATED ALWAYS AS IDENTITY,  -- in one conversation, in its items' order
    item bytea NOT NULL,
    PRIMARY KEY (owner, id, seq),
    FOREIGN KEY (owner, id) REFERENCES pdserve_entries ON DELETE CASCADE
);
CREATE TABLE IF NOT EXISTS pdserve_events (
    owner text, id text,
    run integer,          -- a response that is begun again has its events anew
    first integer,        -- number of the first of these events
    events bytea[] NOT NULL,
    PRIMARY KEY (owner, id, run, first),
    FOREIGN KEY (owner, id) REFERENCES pdserve_entries ON DELETE CASCADE
);
"""
# Coordinators that still run with schema 1 would take conversations for empty: they name the column
# `entry`, so they are told that the store cannot be used. A conversation of schema 1 has its items
# in its entry, until it is written.
FROM_1: Final = """
ALTER TABLE pdserve_entries RENAME COLUMN entry TO packed;
ALTER TABLE pdserve_entries ADD COLUMN items_bytes bigint NOT NULL DEFAULT 0;
"""

INSERT: Final = """
INSERT INTO pdserve_entries (owner, id, packed, maker, items_bytes) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (owner, id) DO UPDATE SET
    packed = excluded.packed, maker = excluded.maker, items_bytes = excluded.items_bytes,
    is_stopped = false, used_at = now(), version = nextval('pdserve_versions')
RETURNING version
"""
# Of a response: by its maker, unless it was deleted, or is made by another one now.
FINISH: Final = """
UPDATE pdserve_entries SET
    packed = $3, maker = $4, used_at = now(), version = nextval('pdserve_versions')
WHERE owner = $1 AND id = $2 AND maker = $5
RETURNING version
"""
# Of a conversation, if it is as it was known.
REPLACE: Final = """
UPDATE pdserve_entries SET
    packed = $3, items_bytes = $5, used_at = now(), version = nextval('pdserve_versions')
WHERE owner = $1 AND id = $2 AND ($4::bigint IS NULL OR version = $4)
RETURNING version
"""
LOCK_ENTRY: Final = "SELECT packed FROM pdserve_entries WHERE owner = $1 AND id = $2 FOR UPDATE"
ITEMS: Final = """
SELECT seq, CASE WHEN seq > $3 THEN item END FROM pdserve_items WHERE owner = $1 AND id = $2
ORDER BY seq
"""
ADD_ITEMS: Final = """
INSERT INTO pdserve_items (owner, id, item)
SELECT $1, $2, item FROM unnest($3::bytea[]) WITH ORDINALITY AS new (item, place) ORDER BY place
RETURNING seq
"""
DELETE_ITEMS: Final = """
DELETE FROM pdserve_items WHERE owner = $1 AND id = $2 AND seq = ANY($3::bigint[])
"""
DELETE: Final = "DELETE FROM pdserve_entries WHERE owner = $1 AND id = $2"
ADD_EVENTS: Final = """
INSERT INTO pdserve_events (owner, id, run, first, events)
SELECT $1::text, $2::text, $3::integer, $4::integer, $5::bytea[] WHERE EXISTS (
    SELECT FROM pdserve_entries WHERE owner = $1 AND id = $2 AND maker = $6
) ON CONFLICT DO NOTHING
"""

# An entry is sent only if it is not the known version, and its items from the last known one on.
# `used_at` is not worth a write a read.
LOOK: Final = """
SELECT owner, id, e.version, used_at < now() - interval '1 hour' AS is_stale,
    CASE WHEN is_new THEN packed END AS packed,
    CASE WHEN is_new THEN ARRAY(
        SELECT seq FROM pdserve_items i WHERE (i.owner, i.id) = (e.owner, e.id) ORDER BY seq
    ) END AS seqs,
    CASE WHEN is_new THEN ARRAY(
        SELECT item FROM pdserve_items i
        WHERE (i.owner, i.id) = (e.owner, e.id) AND seq > last ORDER BY seq
    ) END AS items
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[]) AS known (owner, id, version, last)
LEFT JOIN pdserve_entries e USING (owner, id)
CROSS JOIN LATERAL (SELECT e.version IS DISTINCT FROM known.version) AS seen (is_new)
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
RETURNING owner, id, version, packed, is_stopped
"""

SIZE: Final = """
SELECT count(*) AS number, coalesce(sum(length(packed) + items_bytes), 0) FROM pdserve_entries
"""
# Every owner keeps what it used last, up to a share of which none has more than it needs.
TRIM: Final = """
DELETE FROM pdserve_entries e USING (
    SELECT owner, id, row_number() OVER smallest AS number, sum(bytes) OVER smallest AS bytes FROM (
        SELECT owner, id, bytes, greatest(
            row_number() OVER last / $1::float8, sum(bytes) OVER last / $2::float8
        ) AS part
        FROM (SELECT *, length(packed) + items_bytes AS bytes FROM pdserve_entries) sizes
        WINDOW last AS (PARTITION BY owner ORDER BY used_at DESC, id)
    ) shares WINDOW smallest AS (ORDER BY part, owner, id)
) ranked
WHERE e.owner = ranked.owner AND e.id = ranked.id AND e.maker IS NULL
    AND (ranked.number > $1 OR ranked.bytes > $2)
"""
NOTIFY: Final = f"SELECT pg_notify('{CHANNEL}', $1)"
