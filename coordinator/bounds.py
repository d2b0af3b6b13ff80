"""What callers can use up of a coordinator: what bounds it, and how it is shared.

The bounds are kept by the code that they are imported from; this table only says them. It is also
docs/LIMITS.md: `python -m coordinator.bounds > docs/LIMITS.md`.
"""

from __future__ import annotations

import sys
from dataclasses import astuple, dataclass

from coordinator.adapters.bounds import MAX_ADAPTERS, MAX_NAME_CHARS
from coordinator.adapters.bounds import MAX_BYTES as MAX_ADAPTER_BYTES
from coordinator.admission.arrivals import MOST_CLASSES
from coordinator.api.completions import MAX_GENERATED
from coordinator.api.config import ApiConfig
from coordinator.api.plan.generations import MAX_ECHOED_TOKENS, MAX_LOGPROBS
from coordinator.api.plan.sampling import (
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOPS,
)
from coordinator.api.read.body_budget import WAIT_S
from coordinator.api.read.fields import MAX_ALLOWED_IDS, MAX_BAD_WORDS
from coordinator.api.read.idempotency import KNOWN_S, MAX_KEY_CHARS, MAX_KEYS
from coordinator.api.read.json_text import MAX_CONTAINERS, MAX_ITEMS, MAX_MEMBERS, MAX_NESTING
from coordinator.api.scoring.pairs import MAX_PAIR_CHARS
from coordinator.api.server.connection import MAX_HEAD_BYTES
from coordinator.api.server.outbox import PIECE_BYTES, SHORT_BYTES
from coordinator.api.server.places import TENANT_SHARE, UNKNOWN_SHARE
from coordinator.external.endpoint import MOST_AT_A_TIME
from coordinator.jobs.file_endpoints import MAX_FILE_BYTES
from coordinator.jobs.lines import MAX_LINES
from coordinator.jobs.places import PER_NODE
from coordinator.jobs.storage.database import MAX_BYTES as MAX_JOB_BYTES
from coordinator.jobs.storage.database import MAX_MEMORY_BYTES as MAX_MEMORY_JOB_BYTES
from coordinator.jobs.storage.files import MAX_TENANT_ENTRIES
from coordinator.models.texts import KEPT_BYTES, LOAD_S
from coordinator.stateful.frame_count import MAX_FRAGMENTS, MAX_UNREAD
from coordinator.stateful.pages import MAX_BYTES as MAX_PAGE_BYTES
from coordinator.stateful.pages import MAX_ITEMS as MAX_PAGE_ITEMS
from coordinator.stateful.socket_inbox import MAX_MESSAGE_BYTES
from coordinator.stateful.storage.shared.entries import MAX_BYTES as MAX_SHARED_BYTES
from coordinator.stateful.storage.shared.entries import MAX_ENTRIES
from coordinator.stateful.storage.store import MAX_BYTES, MAX_RESPONSES
from coordinator.stateful.storage.stored import MAX_ITEMS as MAX_CONVERSATION_ITEMS
from coordinator.stateful.storage.stored import MAX_ITEMS_BYTES as MAX_CONVERSATION_BYTES
from coordinator.text.grammars.checker import MAX_WAITING
from coordinator.text.grammars.process import CHECK_CPU_S
from coordinator.text.renderers import MAX_MEMORY_BYTES, RENDER_CPU_S
from coordinator.text.renderers import MOST as MOST_RENDERERS
from coordinator.text.threads import NUM_THREADS
from coordinator.text.threads import WAIT_S as TURN_WAIT_S
from coordinator.text.tokenizer import LONG_TEXT_CHARS, PROBED_CHARS
from pdserve.grammar.budget import ANSWER_CPU_S, MASK_CPU_S, STEP_CPU_S
from pdserve.grammar.matching import MAX_GRAMMAR_CHARS
from pdserve.measured.output_lengths import MOST_KINDS
from pdserve.settings.config import CoordinatorConfig

_API = ApiConfig()
_CLUSTER = CoordinatorConfig()


@dataclass(frozen=True, slots=True)
class Bound:
    """The bounds of one resource, as texts; "-" where there is none of its own."""

    resource: str
    per_call: str
    per_tenant: str
    in_total: str
    beyond: str  # what happens to the caller


def _mib(num_bytes: int) -> str:
    return f"{num_bytes // 2**20} MiB"


_HEAD = """\
# Limits

What a caller can use up of a coordinator, and what bounds it. A caller without a key is a tenant of
its address. `-`: no bound of its own.
"""

BOUNDS = (
    Bound(
        "Bytes of a body",
        _mib(_API.max_body_bytes),
        f"{_mib(_API.max_buffered_bytes // 2)} until the calls are planned, with the objects that "
        "the bodies become; ids of embeddings and scores until these end; of files what is not "
        "written",
        _mib(_API.max_buffered_bytes),
        f"413 before it is read; slow senders are ended, the others wait {WAIT_S:g} s, then 503",
    ),
    Bound(
        "Bytes of a WebSocket",
        f"{_mib(MAX_MESSAGE_BYTES)} and {MAX_FRAGMENTS} fragments a message, not compressed; "
        f"{MAX_UNREAD} frames unread",
        "as for bodies, from the first byte of a frame; one call at a time on a connection",
        "as for bodies",
        "the connection is closed, with the error's event where there was no room",
    ),
    Bound(
        "Objects that a body becomes",
        f"{MAX_CONTAINERS} lists and objects, {MAX_MEMBERS} members, {MAX_ITEMS} items, "
        f"{MAX_NESTING} levels",
        "-",
        "-",
        "400 before they are made",
    ),
    Bound(
        "Connections",
        f"{MAX_HEAD_BYTES // 2**10} KiB of headers",
        f"{_API.max_connections // TENANT_SHARE}; without a key "
        f"{_API.max_connections // UNKNOWN_SHARE} of an address, where keys are needed",
        str(_API.max_connections),
        "431 for the headers, 429 for a tenant; of an address, the oldest without a key is closed; "
        "beyond the total, the new one",
    ),
    Bound(
        "Files and batches",
        f"{_mib(MAX_FILE_BYTES)} and {MAX_LINES} lines a file",
        f"{MAX_JOB_BYTES // 2**31} GiB with what arrives, {MAX_TENANT_ENTRIES} of them; equal "
        "shares of the lines that run",
        f"{MAX_JOB_BYTES // 2**30} GiB, in memory {_mib(MAX_MEMORY_JOB_BYTES)}; {PER_NODE} lines a "
        "node that have not begun, half of what can be in flight",
        "400; lines wait",
    ),
    Bound(
        "Adapters",
        f"a name of {MAX_NAME_CHARS} characters",
        "`max_adapters` of the key file; operators any number",
        f"{MAX_ADAPTERS}, {MAX_ADAPTER_BYTES // 2**30} GiB; a node keeps engine.max_adapters in "
        "engine.adapter_memory",
        "409; on nodes, those not used for long leave, and come back on demand",
    ),
    Bound(
        "Rendering a chat template",
        f"{RENDER_CPU_S:g} s of CPU, {MAX_MEMORY_BYTES // 2**30} GiB",
        "tenants take turns",
        f"one at a time in each of {MOST_RENDERERS} processes at most",
        f"400; 429 after {TURN_WAIT_S:g} s, 504 at the request's time-out",
    ),
    Bound(
        "Tokenising",
        f"what fits into the context: beyond {PROBED_CHARS} characters a token, a text's beginning "
        f"decides; pairs to score {MAX_PAIR_CHARS} characters together",
        f"tenants take turns, of one text or {LONG_TEXT_CHARS} characters of short ones",
        f"{NUM_THREADS} threads for what is longer than {LONG_TEXT_CHARS} characters",
        f"400; 429 after {TURN_WAIT_S:g} s, 504 at the request's time-out",
    ),
    Bound(
        "Tokenizers of several models",
        "-",
        "-",
        f"{_mib(KEPT_BYTES)} of those that sleep",
        f"those asked for last stay; 429 after {LOAD_S:g} s",
    ),
    Bound(
        "Checking a grammar",
        f"{MAX_GRAMMAR_CHARS} characters, {CHECK_CPU_S:g} s of CPU",
        f"{MAX_WAITING} waiting; tenants take turns",
        "one at a time",
        "400; 429 while too many wait",
    ),
    Bound(
        "Log-probabilities, and echoes of prompts",
        f"{MAX_LOGPROBS} entries and {MAX_ECHOED_TOKENS} echoed tokens, of all answers together",
        "encoded in pieces, between which others have their turn",
        "-",
        "400",
    ),
    Bound(
        "Bytes of answers that are not read",
        f"{3 * PIECE_BYTES // 2**10} KiB of a stream, which is made as it is read; other bodies as "
        f"they are; {SHORT_BYTES // 2**10} KiB count for nothing",
        _mib(_API.max_unread_bytes // 2),
        _mib(_API.max_unread_bytes),
        f"the slowest readers of who has most are disconnected, others wait {WAIT_S:g} s, then 503",
    ),
    Bound(
        "Stored responses and conversations",
        f"a conversation {MAX_CONVERSATION_ITEMS} items and {_mib(MAX_CONVERSATION_BYTES)}; a page "
        f"{MAX_PAGE_ITEMS} items and {_mib(MAX_PAGE_BYTES)}, or one item",
        "an even share while the store is full",
        f"{MAX_RESPONSES}, {_mib(MAX_BYTES)}",
        "400 for a conversation; who holds most loses the least recently used",
    ),
    Bound(
        "Those in PostgreSQL, of all coordinators",
        "-",
        "an even share while the tables are full",
        f"{MAX_ENTRIES}, {MAX_SHARED_BYTES >> 30} GiB",
        "the same, once a minute",
    ),
    Bound(
        "Idempotency keys",
        f"{MAX_KEY_CHARS} characters",
        "an even share while the table is full",
        f"{MAX_KEYS}, for {KNOWN_S / 60:g} minutes after the call",
        "who has most loses the oldest: then another body under it is a call of its own",
    ),
    Bound(
        "Answers",
        f"{MAX_GENERATED}",
        "as many on the nodes as leave a ninth of that for others, and its fair share of the "
        "steps (SCHEDULING.md)",
        f"{_CLUSTER.max_inflight} on the nodes, {_CLUSTER.routing.max_waiting} in line",
        "400 for one call; 429 while too many wait",
    ),
    Bound(
        "What is learned of answers and arrivals",
        "-",
        "-",
        f"lengths of {MOST_KINDS} kinds of answers, arrivals of {MOST_CLASSES} classes",
        "the kind that was not met for longest is forgotten; later classes share one",
    ),
    Bound(
        "Calls at a server elsewhere",
        "-",
        "as many as leave a ninth of that for others",
        f"{MOST_AT_A_TIME} at each",
        "429",
    ),
    Bound(
        "Work at each sampled token",
        f"{MAX_STOPS} stop strings of {MAX_STOP_CHARS} characters, {MAX_BAD_WORDS} bad words of "
        f"{MAX_BAD_WORD_TOKENS} tokens together, {MAX_LOGIT_BIAS} biases, {MAX_ALLOWED_IDS} "
        f"allowed ids; masks of a grammar {MASK_CPU_S:g} s of CPU each, {ANSWER_CPU_S:g} s in all",
        f"{STEP_CPU_S * 1e3:g} ms of masks in a step with others: then its answers sit steps out",
        "masks beside steps: one at a time, by turns",
        "400; the answer ends with an error",
    ),
)


def markdown() -> str:
    """Return the document of all bounds."""
    rows = [
        ("resource", "of one call", "of a tenant", "in total", "beyond"),
        ("---",) * 5,
        *map(astuple, BOUNDS),
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{_HEAD}\n{table}\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
