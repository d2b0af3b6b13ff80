"""Which files a model in an object store has. Stores list them; a web server is asked for each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from pdserve.model_files.objects.opening import first_line
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.may_pass import NotNow

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SUMS_FILE: Final = "SHA256SUMS"
_MOST_FILES: Final = 4096
_MOST_SMALL: Final = 64 << 20  # bytes of an index, or of sums
_WILD: Final = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as it is in the store now."""

    name: str
    num_bytes: int
    version: str  # its ETag, or when it was modified

    @property
    def key(self) -> str:
        """What its content is called on this machine, together with the model's address."""
        said = f"{self.name}\0{self.num_bytes}\0{self.version}".encode()
        return hashlib.blake2b(said, digest_size=16).hexdigest()


class Remote:
    """A folder of a store. Blocks."""

    def __init__(self, url: str, store: ObjectStore) -> None:
        self.url = url
        self.store = store
        self._can_list = not url.startswith("http")

    def files(self, patterns: Sequence[str], index: str) -> list[RemoteFile]:
        """Return the files with names like these, sorted; where none can be listed, also those that
        the file `index` names as weights.

        Raises:
            ConfigError: nothing is there, or it may not be read.
            NotNow: the store cannot be reached.
        """
        found = self._listed(patterns) if self._can_list else self._asked(patterns, index)
        if not found:
            raise ConfigError(
                f"{self.url} has no file of a model, or none that may be read: {patterns[0]} ..."
            )
        return sorted(found, key=lambda file: file.name)

    def read_small(self, file: RemoteFile) -> bytes:
        """Return all of a file. Raises as `files`."""
        import obstore

        if file.num_bytes > _MOST_SMALL:
            raise ConfigError(f"{self.url}/{file.name} has {file.num_bytes} bytes: too many")
        with self.failures(file.name):
            return bytes(obstore.get(self.store, file.name).bytes())

    def failures(self, name: str) -> Failures:
        """A context that says what went wrong with a file."""
        return Failures(f"{self.url}/{name}" if name else self.url)

    def _listed(self, patterns: Sequence[str]) -> list[RemoteFile]:
        import obstore

        found: list[RemoteFile] = []
        with self.failures(""):
            for metas in obstore.list(self.store):
                found += [_file(m) for m in metas if _is_like(m["path"], patterns)]
                if len(found) > _MOST_FILES:
                    raise ConfigError(f"{self.url} has more than {_MOST_FILES} files of a model")
        return found

    def _asked(self, patterns: Iterable[str], index: str) -> list[RemoteFile]:
        names = [name for name in patterns if not _WILD & set(name)]
        found = {name: file for name in names if (file := self._head(name)) is not None}
        if index in found:
            for name in _named(self.read_small(found[index])):
                if name not in found and (file := self._head(name)) is not None:
                    found[name] = file
        return list(found.values())

    def _head(self, name: str) -> RemoteFile | None:
        import obstore
        from obstore.exceptions import PermissionDeniedError

        with self.failures(name):
            try:
                return _file(obstore.head(self.store, name) | {"path": name})
            except (FileNotFoundError, PermissionDeniedError):  # some say the one for the other
                return None


class Failures:
    """Makes errors of obstore ours."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        if isinstance(error, FileNotFoundError):
            raise ConfigError(f"there is no {self._what}") from error
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            raise ConfigError(
                f"{self._what} may not be read: credentials are those of the environment, as "
                "AWS_ACCESS_KEY_ID or GOOGLE_APPLICATION_CREDENTIALS; for a public bucket "
                "AWS_SKIP_SIGNATURE=true"
            ) from error
        if isinstance(error, BaseError | OSError):
            raise NotNow(f"{self._what} cannot be read now: {first_line(error)}") from error


def parse_sums(content: bytes, url: str) -> dict[str, str]:
    """Return what a SHA256SUMS file says: name |-> digest. Raises ConfigError."""
    sums = {}
    for line in content.decode(errors="replace").splitlines():
        digest, _, name = line.strip().partition(" ")
        if not line.strip():
            continue
        if len(digest) != 64 or not name.strip():
            raise ConfigError(f"{url}/{SUMS_FILE}: {line[:80]!r} is no line of sha256sum")
        sums[name.strip().removeprefix("*").removeprefix("./")] = digest.lower()
    return sums


def _file(meta: Any) -> RemoteFile:
    version = meta["e_tag"] or str(meta["last_modified"])
    return RemoteFile(meta["path"], meta["size"], version)


def _is_like(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, one) and name.count("/") == one.count("/") for one in patterns)


def _named(index: bytes) -> list[str]:
    """The weight files that an index names; what is wrong with it is said when it is read."""
    try:
        names = {str(name) for name in json.loads(index)["weight_map"].values()}
    except (ValueError, LookupError, TypeError, AttributeError):
        return []
    return sorted(name for name in names if "/" not in name)
