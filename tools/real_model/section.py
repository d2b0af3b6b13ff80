"""Writes the section of docs/MEASUREMENTS.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from tools.real_model.comparison import Agreement
from tools.real_model.drafts import Beside
from tools.real_model.serving import NodeMemory
from tools.real_model.speed import BATCHES, CONTEXT, PREFILL, Speeds, decode

HEADING: Final = "## Gemma 3 270M, Q4_K_M"
MOST_LOAD: Final = 0.3  # of the machine before the run; above it, times say nothing
UNMEASURED: Final = "not measured"


@dataclass(slots=True)
class Found:
    """What a run has found."""

    setup: str  # date, processor, cores, kernels
    versions: str
    load: float  # before the run
    text: str = ""  # whose perplexity it is
    num_text: int = 0  # its tokens
    agreements: dict[str, Agreement] = field(default_factory=dict)  # mode |-> of its answers
    perplexities: dict[str, float] = field(default_factory=dict)  # who |-> of the text
    text_worst: float = 0.0  # largest difference of a log-probability of the text
    ready_s: dict[str, float] = field(default_factory=dict)  # which start |-> until it is ready
    node_memory: NodeMemory = field(default_factory=NodeMemory)
    file_bytes: int = 0
    kv_bytes: int = 0
    ours: Speeds = field(default_factory=dict)
    theirs: Speeds = field(default_factory=dict)
    served: Speeds = field(default_factory=dict)
    drafts: Beside | None = None
    without_llama: str = ""  # why it was not measured

    @property
    def is_quiet(self) -> bool:
        """Whether times may be written down."""
        return self.load < MOST_LOAD

    def memory_ratio(self, num_bytes: int) -> float:
        """Memory of a node over that of the file and its KV."""
        return num_bytes / (self.file_bytes + self.kv_bytes)


def section_of(found: Found) -> str:
    """Return the section: its heading, how it was measured, and a table."""
    head = f"{found.setup}; load {found.load:.2f}; {found.versions}: `make real`."
    note = "llama.cpp alone: its steps, without a server or sampling; best of its thread counts."
    if found.without_llama:
        note = f"llama.cpp was not measured: {found.without_llama}."
    rows = ["| what | pdserve | beside |", "|---|---|---|", *_exact(found), *_timed(found)]
    return "\n".join([HEADING, "", head, note, "", *rows, ""])


def replaced(document: str, section: str) -> str:
    """Return the document with its section replaced, or put behind the last one."""
    before, heading, rest = document.partition(f"{HEADING}\n")
    if not heading:
        return f"{document.rstrip()}\n\n{section}"
    _, mark, after = rest.partition("\n## ")
    return before + section + (f"\n## {after}" if mark else "")


def _exact(found: Found) -> Iterator[str]:
    """What no load changes."""
    for mode, agreement in found.agreements.items():
        right = agreement.decided - agreement.wrong
        what = f"greedy tokens as transformers' in float32, {mode}"
        yield f"| {what} | {right} of {agreement.decided} decided | {agreement.tokens} in all |"
    if found.agreements:
        worst = max(agreement.worst for agreement in found.agreements.values())
        pair = f"{worst:.2g}; {found.text_worst:.2g}"
        yield f"| largest difference of a log-probability: answers; text | {pair} | |"
    if found.perplexities:
        ours, theirs = (f"{found.perplexities[who]:.4f}" for who in ("pdserve", "transformers"))
        what = f"perplexity of {found.text}, {found.num_text} tokens"
        yield f"| {what} | {ours} | {theirs} (transformers) |"
    if found.node_memory.resident:
        both = found.node_memory.resident, found.node_memory.share
        sizes = "; ".join(f"{size / 2**20:.0f}" for size in both)
        ratios = "; ".join(f"{found.memory_ratio(size):.2f}" for size in both)
        what = "memory of a node: resident; its share of it (PSS), MiB"
        yield f"| {what} | {sizes} | {ratios} times the file and KV |"


def _timed(found: Found) -> Iterator[str]:
    def shown(values: Mapping[str, float], name: str, places: int = 0) -> str:
        if not found.is_quiet or name not in values:
            return UNMEASURED
        return f"{values[name]:,.{places}f}"

    first, packed = (shown(found.ready_s, name, 1) for name in ("first", "packed"))
    yield f"| from start to ready: first; packed before, s | {first}; {packed} | |"
    behind = [(decode(batch), f", context {CONTEXT}") for batch in BATCHES]
    for name, more in [*behind, (PREFILL, "")]:
        both = f"{shown(found.ours, name)} | {shown(found.theirs, name)}"
        yield f"| {name}{more}, tokens/s | {both} |"
    yield from _drafted(found)
    streams = "; ".join(shown(found.served, str(batch)) for batch in BATCHES)
    sizes = " and ".join(map(str, BATCHES))
    yield f"| served co-located to {sizes} streams, tokens/s | {streams} | |"


def _drafted(found: Found) -> Iterator[str]:
    """Drafts from text, of answers that repeat much of their prompts."""
    beside = found.drafts if found.is_quiet else None
    ours = theirs = of_ours = of_theirs = UNMEASURED
    what = "drafts from text, 1 stream"
    if beside is not None:
        ours = f"{beside.off:.0f}; {beside.ours.tokens_per_s:.0f}"
        of_ours = f"{beside.ours.right:.0%} of {beside.ours.drafted}"
    if beside is not None and (fastest := beside.fastest) is not None:
        plain = next(one.tokens_per_s for one in beside.theirs if one.kind == "NONE")
        theirs = f"{plain:.0f}; {fastest.tokens_per_s:.0f} ({fastest.kind.lower()})"
        of_theirs = f"{fastest.right:.0%} of {fastest.drafted}"
    yield f"| {what}, tokens/s without; with | {ours} | {theirs} |"
    yield f"| {what}, of which right | {of_ours} | {of_theirs} |"
