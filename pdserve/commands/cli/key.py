"""`pdserve key`: creates an API key, and prints the entry for the key file."""

from __future__ import annotations

from coordinator.tenants.identity import check_name
from coordinator.tenants.keys import new_key
from pdserve.settings.access import hash_key
from pdserve.shared.process.exit_codes import OK


def run(tenant: str) -> int:
    """Print a new key and its entry for the key file; the exit code.

    Raises:
        ConfigError: a key file cannot have a tenant with this name.
    """
    check_name(tenant)
    key = new_key()
    print(f"# the key, for its owner; it is shown here only\n# {key}\n")
    table = f'"{tenant}"' if "." in tenant else tenant
    print(f'[tenants.{table}]\nkeys = ["{hash_key(key)}"]')
    return OK
