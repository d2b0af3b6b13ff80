"""The words of the documents, and their longest sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_END = re.compile(r"(?<=[.:;!?])\s+(?=[A-Z*`(\[])|\n\n+|\n(?=\s*(?:[*-]|\d+\.)\s)")
_MARK = re.compile(r"^\s*(?:[*-]|\d+\.)\s")


@dataclass(frozen=True)
class Document:
    """One Markdown file that a stranger reads."""

    path: Path  # from the repository's root
    text: str

    @property
    def num_words(self) -> int:
        """All of them, as `wc -w` counts."""
        return len(self.text.split())

    def sentences(self) -> Iterator[str]:
        """Those of its prose: no code, headings or tables."""
        prose = "\n".join(
            "" if line.startswith(("|", "#")) else line
            for line in _CODE.sub("\n\n", self.text).splitlines()
        )
        for sentence in _END.split(prose):
            if words := " ".join(_MARK.sub("", sentence).split()):
                yield words


def read_documents(root: Path) -> list[Document]:
    """README, ARCHITECTURE, CONTRIBUTING and docs/: what has a bound together."""
    names = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
    paths = [root / name for name in names] + sorted((root / "docs").glob("*.md"))
    there = [path for path in paths if path.is_file()]
    return [Document(path.relative_to(root), path.read_text()) for path in there]
