"""Whether there is a prefix store where the settings say, before a node starts."""

from __future__ import annotations

import logging
from typing import Final

from kv_transfer.lone_thread import LoneThread
from kv_transfer.store.objects import blobs_at
from pdserve.model_files.objects.opening import is_object_url
from pdserve.settings.prefixes import PrefixConfig
from pdserve.settings.values import parse_bytes
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.may_pass import NotNow, config_error

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0


def check_store(config: PrefixConfig, look_s: float = LOOK_S) -> None:
    """Look whether there can be a store. One that does not answer may come back.

    Raises:
        ConfigError: there can be none.
    """
    where = config.kv_store
    blobs = blobs_at(where)
    if is_object_url(where) and parse_bytes(config.kv_store_size) == 0:
        raise ConfigError(f"kv_store {where!r} has no end: say kv_store_size, as 500GiB")
    thread = LoneThread("kv-store-look")
    try:
        thread.submit(blobs.open).result(look_s)
    except TimeoutError:
        log.warning("kv_store %r does not answer within %g s", where, look_s)
    except OSError as error:
        failure = config_error(f"kv_store {where!r} cannot be used: {error}", error)
        if not is_object_url(where) and not isinstance(failure, NotNow):
            raise failure from error
        log.warning("%s", failure)
    finally:
        thread.close()
