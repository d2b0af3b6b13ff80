"""Installs this source tree for `make`, and says how far it is: compiling the kernels takes long.

Usage: python tools/install.py TARGET [FLAGS OF PIP]
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

_STEP = re.compile(r"\[(\d+)/(\d+)\] ")  # of ninja, and of make's percentages below
_SHARE = re.compile(r"\[ *(\d+)%\] ")
_PACKAGE = re.compile(r"^(?:Collecting|Downloading|Installing collected packages:) *(\S+)")
_KEPT_LINES = 200  # that are shown if it fails


def main() -> None:
    """Run the command."""
    target, *flags = sys.argv[1:]
    command = [sys.executable, "-m", "pip", "install", "--verbose", "--disable-pip-version-check"]
    say(f"installing {target}: packages first, then the C++ kernels are compiled, for a minute")
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    with subprocess.Popen(
        [*command, *flags, "--editable", target],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        for told in progress(kept(pip.stdout, lines)):
            say(told)
    if pip.returncode:
        sys.stderr.writelines(lines)
        sys.exit(pip.returncode)
    say(f"{target} is installed in {Path(sys.prefix).name}")


def kept(lines: Iterable[str], last: deque[str]) -> Iterator[str]:
    """Pass lines on, and keep the last ones."""
    for line in lines:
        last.append(line)
        yield line


def progress(lines: Iterable[str]) -> Iterator[str]:
    """Of what pip writes, what tells how far it is: packages once, compiling in steps of 10 %."""
    packages: set[str] = set()
    tenth = -1
    for line in lines:
        if package := _PACKAGE.match(line):
            if package[1] not in packages:
                packages.add(package[1])
                yield f"package {package[1]}"
            continue
        share = _share(line)
        if share is not None and share * 10 // 1 > tenth:
            tenth = int(share * 10)
            yield f"compiling, {share:.0%}"


def _share(line: str) -> float | None:
    """How much is compiled, if the line says so."""
    if step := _STEP.search(line):
        return int(step[1]) / max(1, int(step[2]))
    share = _SHARE.search(line)
    return int(share[1]) / 100 if share else None


def say(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(f"install | {text}", flush=True)


if __name__ == "__main__":
    main()
