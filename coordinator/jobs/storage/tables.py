"""The tables of files and batches, for both kinds of databases."""

from __future__ import annotations

from typing import Final

SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS pdserve_files (
        id text PRIMARY KEY, owner text NOT NULL, name text NOT NULL, purpose text NOT NULL,
        bytes bigint NOT NULL, created_at bigint NOT NULL, expires_at bigint NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS pdserve_files_of ON pdserve_files (owner, created_at, id)",
    # Of a file that is being written there are chunks before there is a row.
    """CREATE TABLE IF NOT EXISTS pdserve_chunks (
        file text NOT NULL, number bigint NOT NULL, written_at bigint NOT NULL,
        bytes {BLOB} NOT NULL, PRIMARY KEY (file, number)
    )""",
    """CREATE TABLE IF NOT EXISTS pdserve_batches (
        id text PRIMARY KEY, owner text NOT NULL, kind text NOT NULL, status text NOT NULL,
        created_at bigint NOT NULL, deadline_at bigint NOT NULL, document {BLOB} NOT NULL,
        holder text NOT NULL, held_until double precision NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS pdserve_batches_of ON pdserve_batches (owner, created_at, id)",
    """CREATE TABLE IF NOT EXISTS pdserve_lines (
        batch text NOT NULL, number bigint NOT NULL, custom_id text NOT NULL,
        prefix {BLOB} NOT NULL, body {BLOB} NOT NULL, state bigint NOT NULL,
        answer {BLOB} NOT NULL, PRIMARY KEY (batch, number)
    )""",
    "CREATE UNIQUE INDEX IF NOT EXISTS pdserve_line_ids ON pdserve_lines (batch, custom_id)",
    """CREATE INDEX IF NOT EXISTS pdserve_lines_left
        ON pdserve_lines (batch, state, prefix, number)""",
    # Of a batch that has lines: in state 0 how many there are, and the bytes of their requests; in
    # others how many have come to it, and the bytes of their answers.
    """CREATE TABLE IF NOT EXISTS pdserve_tallies (
        batch text NOT NULL, state bigint NOT NULL, lines bigint NOT NULL, bytes bigint NOT NULL,
        PRIMARY KEY (batch, state)
    )""",
    # Those that are not over, among all that are listed.
    """CREATE INDEX IF NOT EXISTS pdserve_batches_running ON pdserve_batches (owner, created_at, id)
        WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling')""",
)

PUT_CHUNK: Final = "INSERT INTO pdserve_chunks VALUES (?, ?, ?, ?)"
GET_CHUNK: Final = "SELECT bytes FROM pdserve_chunks WHERE file = ? AND number = ?"
DROP_CHUNK: Final = "DELETE FROM pdserve_chunks WHERE file = ? AND number = ?"
LOST_CHUNKS: Final = """
SELECT file, number FROM pdserve_chunks
WHERE written_at < ? AND file NOT IN (SELECT id FROM pdserve_files)
"""
_FILE = "id, name, purpose, bytes, created_at, expires_at"
PUT_FILE: Final = "INSERT INTO pdserve_files VALUES (?, ?, ?, ?, ?, ?, ?)"
GET_FILE: Final = f"SELECT {_FILE} FROM pdserve_files WHERE owner = ? AND id = ? AND expires_at > ?"
DROP_FILE: Final = "DELETE FROM pdserve_files WHERE owner = ? AND id = ? RETURNING bytes"
OLD_FILES: Final = "SELECT owner, id FROM pdserve_files WHERE expires_at <= ? LIMIT 16"
# What a tenant has stored: files, and lines with their answers; and what all have. Files that have
# expired are no tenant's any more, but they are there until they are deleted.
STORED: Final = """
SELECT (SELECT coalesce(sum(bytes), 0) FROM pdserve_files WHERE owner = ? AND expires_at > ?)
    + (SELECT coalesce(sum(bytes), 0) FROM pdserve_tallies
        WHERE batch IN (SELECT id FROM pdserve_batches WHERE owner = ?)),
    (SELECT count(*) FROM pdserve_files WHERE owner = ? AND expires_at > ?)
    + (SELECT count(*) FROM pdserve_batches WHERE owner = ?),
    (SELECT coalesce(sum(bytes), 0) FROM pdserve_files)
    + (SELECT coalesce(sum(bytes), 0) FROM pdserve_tallies)
"""

_BATCH = "id, owner, kind, status, created_at, deadline_at, document"
PUT_BATCH: Final = "INSERT INTO pdserve_batches VALUES (?, ?, ?, ?, ?, ?, ?, '', {NOW} + ?)"
IS_WHOLE: Final = "AND status <> 'arriving'"  # else its lines are still being written
GET_BATCH: Final = f"""
SELECT {_BATCH} FROM pdserve_batches WHERE owner = ? AND id = ? AND kind = ? {IS_WHOLE}
"""
DROP_BATCH: Final = "DELETE FROM pdserve_batches WHERE owner = ? AND id = ?"
OLD_BATCHES: Final = f"SELECT {_BATCH} FROM pdserve_batches WHERE created_at <= ? LIMIT 16"
RUNNING: Final = "('validating', 'in_progress', 'finalizing', 'cancelling')"
CANCEL: Final = f"""
UPDATE pdserve_batches SET status = 'cancelling', document = ?
WHERE owner = ? AND id = ? AND status IN ('validating', 'in_progress') RETURNING {_BATCH}
"""
# By its holder: a batch that is being cancelled stays so until it has ended.
GO_ON: Final = f"""
UPDATE pdserve_batches SET status = ?, document = ?
WHERE id = ? AND holder = ? AND (status <> 'cancelling' OR ? NOT IN {RUNNING}) RETURNING id
"""
ARRIVING: Final = """
UPDATE pdserve_batches SET held_until = {NOW} + ?
WHERE id = ? AND status = 'arriving' RETURNING id
"""
ARRIVES: Final = """
UPDATE pdserve_batches SET status = ?, held_until = 0
WHERE id = ? AND status = 'arriving' RETURNING id
"""
# By its holder, who reads its file; the row is locked against another claim meanwhile.
READS: Final = """
UPDATE pdserve_batches SET status = status
WHERE id = ? AND holder = ? AND status IN ('validating', 'cancelling') RETURNING id
"""
RENEW: Final = """
UPDATE pdserve_batches SET held_until = {NOW} + ? WHERE holder = ? AND held_until > {NOW}
"""
# The oldest few of each tenant's. `held_until` is looked at again, when another claim at the same
# time is over.
CLAIM: Final = f"""
UPDATE pdserve_batches SET holder = ?, held_until = {{NOW}} + ?
WHERE held_until <= {{NOW}} AND id IN (
    SELECT id FROM (
        SELECT id, status, row_number() OVER (PARTITION BY owner ORDER BY created_at, id) AS place
        FROM pdserve_batches WHERE status IN {RUNNING}
    ) AS ranked WHERE place <= ? OR status = 'cancelling'
) RETURNING {_BATCH}
"""
HELD: Final = f"SELECT {_BATCH} FROM pdserve_batches WHERE holder = ? AND status IN {RUNNING}"
RELEASE: Final = "UPDATE pdserve_batches SET held_until = 0 WHERE holder = ?"
RELEASE_ALL: Final = "UPDATE pdserve_batches SET held_until = 0"

PUT_LINE: Final = "INSERT INTO pdserve_lines VALUES (?, ?, ?, ?, ?, 0, ?)"
# So many at a time.
DROP_LINES: Final = """
DELETE FROM pdserve_lines WHERE batch = ? AND number IN (
    SELECT number FROM pdserve_lines WHERE batch = ? LIMIT ?
) RETURNING number
"""
DROP_TALLY: Final = "DELETE FROM pdserve_tallies WHERE batch = ?"
# Batches that have lines, and are over, or arrived in part.
LEFT_OVER: Final = f"""
SELECT batch FROM pdserve_tallies WHERE state = 0 AND batch NOT IN (
    SELECT id FROM pdserve_batches WHERE status IN {RUNNING} OR status = 'arriving'
) LIMIT 16
"""
DROP_ARRIVING: Final = (
    "DELETE FROM pdserve_batches WHERE status = 'arriving' AND held_until <= {NOW}"
)
# An answer is written with its mark, and only the first one.
ANSWER: Final = """
UPDATE pdserve_lines SET state = ?, answer = ?, body = ?
WHERE batch = ? AND number = ? AND state = 0 RETURNING number
"""
ADD_TO_TALLY: Final = """
INSERT INTO pdserve_tallies VALUES (?, ?, ?, ?) ON CONFLICT (batch, state) DO UPDATE
SET lines = pdserve_tallies.lines + excluded.lines, bytes = pdserve_tallies.bytes + excluded.bytes
"""
TALLY: Final = "SELECT state, lines FROM pdserve_tallies WHERE batch = ?"
END_LINES: Final = """
UPDATE pdserve_lines SET state = ?, body = ? WHERE batch = ? AND number IN (
    SELECT number FROM pdserve_lines WHERE batch = ? AND state = 0 LIMIT ?
) RETURNING number
"""
COUNTS: Final = "SELECT state, count(*) FROM pdserve_lines WHERE batch = ? GROUP BY state"
BODY: Final = "SELECT body FROM pdserve_lines WHERE batch = ? AND number = ?"
LEFT: Final = """
SELECT number, custom_id, prefix FROM pdserve_lines
WHERE batch = ? AND state = 0 AND (prefix, number) > (?, ?)
ORDER BY prefix, number LIMIT ?
"""
ANSWERED: Final = """
SELECT number, custom_id, state, answer FROM pdserve_lines
WHERE batch = ? AND number > ? AND state <> 0 ORDER BY number LIMIT ?
"""


def page(table: str, *, newest_first: bool, filters: str = "") -> str:
    """Return the statement of a page of a tenant's files or batches, behind one entry or none.

    Parameters: owner, those of the filters, `created_at` and id of the entry (twice created_at),
    limit.
    """
    columns = _FILE if table == "pdserve_files" else _BATCH
    sign, order = ("<", "DESC") if newest_first else (">", "ASC")
    return (
        f"SELECT {columns} FROM {table} WHERE owner = ? {filters} "
        f"AND (created_at {sign} ? OR (created_at = ? AND id {sign} ?)) "
        f"ORDER BY created_at {order}, id {order} LIMIT ?"
    )
