"""Opens an object store by its address. Credentials are the environment's, as its vendor says.

obstore is a third of s3fs beside gcsfs in size, and one library for all three. It needs no package
that pins others, as s3fs needs one version of botocore, and lets go of the interpreter's lock.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from pdserve.shared.errors import ConfigError
from pdserve.shared.hints.extras import how_to_install

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES: Final = ("s3", "gs", "https", "http")
SILENCE_S: Final = 30  # of a server, after which what it was asked is asked again
_RETRIES: Final = 3


def is_object_url(source: str) -> bool:
    """Whether a model's source is in an object store."""
    return source.partition("://")[0] in SCHEMES and "://" in source


def open_store(url: str) -> ObjectStore:
    """Open the store of what is below an address; nothing is asked of it yet.

    Raises:
        ConfigError: the extra is not installed, or this is no address of a store.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.netloc:
        raise ConfigError(f"{url!r} is no address: write s3://, gs:// or https://HOST/PATH")
    if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(f"{url!r}: what is fetched in clear could be anybody's, so use https://")
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise ConfigError(f"{url!r} needs an extra: {how_to_install('objects')}") from error
    in_clear = parts.scheme == "http" or os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
    try:
        return from_url(
            url,
            client_options={
                "allow_http": in_clear,
                "connect_timeout": "5s",
                "read_timeout": f"{SILENCE_S}s",
                "timeout": "1day",  # for large files: silence is what tells
            },
            retry_config={"max_retries": _RETRIES},
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{url!r} cannot be opened: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What of an error is for people; obstore's have pages for its developers."""
    return str(error).strip().partition("\n")[0]
