"""What `make` says while pip works."""

from collections import deque

from tools.install import kept, progress

LINES = [
    "Using pip 24.0\n",
    "Collecting numpy>=2\n",
    "Downloading numpy-2.3.0.whl (16 MB)\n",
    "Collecting numpy>=2\n",
    "  *** Building project with Ninja...\n",
    *(f"  [{i}/40] Building CXX object {i}.o\n" for i in range(1, 41)),
    "Successfully installed pdserve\n",
]


def test_packages_are_told_once_and_compiling_in_tenths():
    told = [*progress(LINES)]
    assert told[:3] == ["package numpy>=2", "package numpy-2.3.0.whl", "compiling, 2%"]
    assert told[-1] == "compiling, 100%"
    assert len(told) == 2 + 11


def test_the_last_lines_are_kept_for_when_it_fails():
    last = deque(maxlen=2)
    assert [*kept(LINES, last)] == LINES
    assert [*last] == LINES[-2:]
