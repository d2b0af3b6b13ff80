"""Writes the exact versions of all packages that the image needs: `make lock`.

pip resolves them anew, as for a fresh environment, and installs nothing. The versions are those of
this Python and platform; torch's build is left to the index that is used.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "deploy" / "requirements.lock"
HEAD = "# By `make lock`. The image has these versions; torch's build is that of its index.\n"


def main() -> None:
    """Run the command."""
    asked = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    done = subprocess.run(
        [*asked, "--report=-", f"{ROOT}[postgres,objects]"],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    packages = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    lines = sorted(
        f"{package['name'].lower()}=={package['version'].partition('+')[0]}\n"
        for package in packages
        if package["name"] != "pdserve"
    )
    LOCK.write_text(HEAD + "".join(lines))
    print(f"{len(lines)} packages in {LOCK.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
