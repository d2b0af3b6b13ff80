"""Print the lists and the totals."""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.house.chat import Entered, files_of_a_chat
from tools.house.documents import Document, read_documents
from tools.house.files import AREAS, File, length, num_parameters, read_files

LISTED = 12  # rows of each list
FEW_LINES = 40
COMMANDS = ("up", "coordinator", "prefill", "decode")
PATTERNS = {
    "monkeypatch.setattr": r"\bmonkeypatch\.setattr\b",
    "ignore[arg-type]": r"ignore\[arg-type\]",
}


def main() -> None:
    """Report on the repository in the working directory."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__)
    parser.add_argument("--chat", action="store_true", help="also count what a chat enters")
    with_chat = parser.parse_args().chat
    root = Path.cwd()
    files = read_files(root)
    for line in report(files):
        print(line)
    for line in documents_report(read_documents(root)):
        print(line)
    for command in COMMANDS:
        print(f"options of {command:12} {num_options(command)}")
    if with_chat:
        for line in chat_report(files, files_of_a_chat(root)):
            print(line)


def report(files: list[File]) -> Iterator[str]:
    """All that the files alone tell."""
    product = [file for file in files if file.area in ("serving", "benchmarks", "training")]
    yield from _lists(product)
    yield "\nTotals"
    for area in AREAS:
        yield f"{area:24} {_size(file for file in files if file.area == area)}"
    yield f"{'product':24} {_size(product)}"
    helpers = [file for file in files if file.is_test_helper]
    yield f"{'helpers of tests':24} {_size(helpers)}"
    yield f"{'fakes':24} {_size(file for file in helpers if file.is_fake)}"
    private = [name for file in helpers for name in file.private_imports()]
    yield f"{'private imports':24} {len(private)} in helpers of tests"
    lines = sum(file.num_filled_lines for file in product)
    imports = sum(file.num_import_lines for file in product)
    yield f"{'import share':24} {imports / lines:.1%} of the product's lines that are not blank"
    lengths = sorted(length(function) for file in product for function in file.functions())
    p90 = lengths[len(lengths) * 9 // 10]
    p50 = statistics.median(lengths)
    yield f"{'function length':24} p50 {p50:g}, p90 {p90:g}, max {lengths[-1]} lines"
    tests = [file for file in files if file.area == "tests"]
    for name, pattern in PATTERNS.items():
        yield f"{name:24} {sum(len(re.findall(pattern, file.text)) for file in tests)} in tests"


def _lists(product: list[File]) -> Iterator[str]:
    functions = [(file, each) for file in product for each in file.functions()]
    longest = [(length(each), f"{file.path}: {each.name}") for file, each in functions]
    yield from _top("Longest functions (lines)", longest)
    parameters = [(num_parameters(each), f"{file.path}: {each.name}") for file, each in functions]
    yield from _top("Most parameters", parameters)
    folders = Counter(str(file.path.parent) for file in product)
    yield from _top("Biggest folders (files)", [(n, name) for name, n in folders.items()])
    places = defaultdict(list)
    for file in product:
        for name in file.public_classes():
            places[name].append(str(file.path))
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    yield f"\nPublic class names in several files: {len(twice)}"
    for name, paths in sorted(twice.items()):
        yield f"  {name}: {', '.join(paths)}"
    short = Counter(
        str(file.path.parent)
        for file in product
        if file.num_lines < FEW_LINES and file.path.name != "__init__.py"
    )
    title = f"Files of under {FEW_LINES} lines ({short.total()} without __init__), by folder"
    yield from _top(title, [(n, name) for name, n in short.items()])


def _top(title: str, rows: Iterable[tuple[int, str]]) -> Iterator[str]:
    yield f"\n{title}"
    for number, what in sorted(rows, key=lambda row: (-row[0], row[1]))[:LISTED]:
        yield f"  {number:4} {what}"


def _size(files: Iterable[File]) -> str:
    sizes = [file.num_lines for file in files]
    return f"{len(sizes):5} files {sum(sizes):7} lines"


def documents_report(documents: list[Document]) -> Iterator[str]:
    """How much there is to read, and what reads worst."""
    words = [(document.num_words, str(document.path)) for document in documents]
    yield from _top("Documents (words)", words)
    yield f"{'words together':24} {sum(number for number, _ in words)}"
    sentences = [
        (len(sentence.split()), f"{document.path}: {sentence[:60]}")
        for document in documents
        for sentence in document.sentences()
    ]
    yield from _top("Longest sentences (words)", sentences)


def num_options(command: str) -> int:
    """How many options the command's help shows; `--x, --no-x` is one."""
    shown = subprocess.run(
        [sys.executable, "-m", "pdserve", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    return len(re.findall(r"^  (?:-h, )?--", shown.stdout, re.MULTILINE)) - 1  # not --help


def chat_report(files: list[File], entered: dict[str, Entered]) -> Iterator[str]:
    """The size of what a chat enters, by process."""
    sizes = {file.path: file for file in files}
    yield "\nEntered by one streamed chat, prefilled on one node and decoded on another, with ticks"
    for process, found in entered.items():
        yield f"{process:24} {_size(sizes[path] for path in found.together)}"
    together = set().union(*(found.together for found in entered.values()))
    yield f"{'together':24} {_size(sizes[path] for path in together)}"
    by_chat = set().union(*(found.by_chat for found in entered.values()))
    yield f"{'of these by ticks alone':24} {_size(sizes[path] for path in together - by_chat)}"
    for path in sorted(together):
        marks = " ".join(name for name, found in entered.items() if path in found.together)
        yield f"  {path} ({marks})"


if __name__ == "__main__":
    main()
