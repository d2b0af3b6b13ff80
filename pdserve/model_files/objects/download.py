"""Fetches one file of an object store: goes on where it broke off, and knows its digest."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

from pdserve.model_files.objects.listing import Remote, RemoteFile
from pdserve.model_files.objects.opening import first_line
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.may_pass import NotNow

log = logging.getLogger(__name__)

CHUNK: Final = 4 << 20
PAUSES_S: Final = (0.0, 0.5, 1.0, 2.0, 4.0)  # before each try in a row that brings nothing


def fetch(
    remote: Remote, file: RemoteFile, to: Path, pause: Callable[[float], None] = time.sleep
) -> str:
    """Fetch a file, unless it is here; return its SHA-256 in hexadecimal.

    What is here of it stays, also when this raises, so that the next one goes on from there.

    Raises:
        ConfigError: it is not there any more in this version, or may not be read.
        NotNow: the store broke off again and again.
        OSError: it cannot be written here.
    """
    known = to.with_name(f"{to.name}.sha256")
    if to.exists() and known.exists():
        return known.read_text()
    part = to.with_name(f"{to.name}.part")
    with part.open("ab+") as out:
        digest = _complete(remote, file, out, pause)
        out.flush()
        os.fsync(out.fileno())
    known.write_text(digest)
    part.rename(to)
    return digest


def _complete(
    remote: Remote, file: RemoteFile, out: BinaryIO, pause: Callable[[float], None]
) -> str:
    """Append what is missing of a file; return the digest of all of it."""
    digest, num_tries = hashlib.sha256(), 0
    out.seek(0)
    while chunk := out.read(CHUNK):
        digest.update(chunk)
    if out.tell() > file.num_bytes:
        raise ConfigError(f"{out.name} has more bytes than {remote.url}/{file.name}: remove it")
    while (start := out.tell()) < file.num_bytes:
        pause(PAUSES_S[num_tries])
        fault = _append(remote, file, out, digest)
        num_tries = 0 if out.tell() > start else num_tries + 1
        if num_tries == len(PAUSES_S):
            raise NotNow(
                f"{remote.url}/{file.name} breaks off after {start} of {file.num_bytes} bytes: "
                f"{fault or 'there is no more of it'}"
            )
    return digest.hexdigest()


def _append(remote: Remote, file: RemoteFile, out: BinaryIO, digest: hashlib._Hash) -> str:
    """Append as much as comes in one go; return why it broke off."""
    import obstore
    from obstore.exceptions import BaseError, PreconditionError

    start = out.tell()
    options: dict[str, Any] = {"range": {"offset": start}} if start else {}
    if file.version.startswith('"'):  # of this version alone
        options["if_match"] = file.version
    try:
        found = obstore.get(remote.store, file.name, options=options)
        for chunk in found.stream(min_chunk_size=CHUNK):
            data = memoryview(chunk)[: file.num_bytes - out.tell()]
            out.write(data)
            digest.update(data)
    except PreconditionError as error:
        raise NotNow(f"{remote.url}/{file.name} was changed meanwhile: start again") from error
    except FileNotFoundError as error:
        raise NotNow(f"{remote.url}/{file.name} was removed meanwhile") from error
    except (BaseError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of this machine's disk
            raise
        log.info("%s/%s broke off: %s", remote.url, file.name, first_line(error))
        return first_line(error)
    return ""
