"""`pdserve key`: a new API key, and what to write into the key file."""

from __future__ import annotations

from coordinator.tenants.keys import hash_key, new_key
from pdserve.cli.exit_codes import OK


def run(tenant: str) -> int:
    """Print a key, once, and the lines of the key file that make it good; the exit code."""
    key = new_key()
    print(f"# the key, for its owner; it is shown here only\n# {key}\n")
    print(f'[tenants.{tenant}]\nkeys = ["{hash_key(key)}"]')
    return OK
