"""`pdserve store`: what is in a prefix store, by tenant; and erases all of one of them."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kv_transfer.store.entry import owner_name
from kv_transfer.store.erasure import erase
from kv_transfer.store.eviction import Content
from kv_transfer.store.objects import blobs_at
from pdserve.model_files.objects.opening import is_object_url
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.exit_codes import OK


def run(where: str, tenant: str | None) -> int:
    """Erase the prefixes of a tenant or cache group ("": nobody's), if one is given, and list.

    Raises:
        ConfigError: there is no such store, or it cannot be read or written.
    """
    if not is_object_url(where) and not Path(where).is_dir():
        raise ConfigError(f"there is no folder {where}: give what nodes have as prefix.kv_store")
    blobs = blobs_at(where)
    try:
        if tenant is not None:
            number = erase(blobs, tenant)
            print(f"erased {number} blocks; nodes write none again that they have now")
        content = Content.of(blobs.blobs())
    except OSError as error:
        raise ConfigError(f"the store in {where} cannot be used: {error}") from error
    Console().print(_table(content, time.time()))
    return OK


def _table(content: Content, now_s: float) -> Table:
    table = Table("tenant or group", box=None)
    for what in ("blocks", "MiB", "oldest, hours"):
        table.add_column(what, justify="right")
    nobody = owner_name("")
    for owner, blobs in sorted(content.by_owner.items()):
        age_s = now_s - min(blob.stamp_s for blob in blobs)
        size = sum(blob.num_bytes for blob in blobs) / (1 << 20)
        name = "(nobody)" if owner == nobody else owner.removeprefix("of-")
        table.add_row(name, f"{len(blobs):,}", f"{size:,.1f}", f"{age_s / 3600:.1f}")
    return table
