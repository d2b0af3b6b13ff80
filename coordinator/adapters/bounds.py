"""How many adapters there may be, of whom, and under which names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from coordinator.adapters.known import KnownAdapters
from pdserve.shared.errors import AdaptersFull, InvalidRequest, ModelNotFound, PermissionDenied

MAX_ADAPTERS: Final = 1024  # names
MAX_BYTES: Final = 64 << 30  # of all adapters together
MAX_NAME_CHARS: Final = 256


class AdapterBounds:
    """What is refused of loads, among the adapters that are there or being loaded."""

    def __init__(self, known: KnownAdapters, is_taken: Callable[[str], bool]) -> None:
        """`is_taken`: whether a name is that of a model, or of another one's adapter."""
        self._known = known
        self._is_taken = is_taken
        self._loading: dict[str, str] = {}  # name |-> owner

    def check_name(self, name: str, owner: str, *, in_place: bool, own_only: bool) -> None:
        """Raises InvalidRequest, or PermissionDenied: it stands for what another has loaded."""
        if self._is_taken(name):
            raise InvalidRequest(f"{name!r} is the name of a model: choose another", "lora_name")
        if not (0 < len(name) <= MAX_NAME_CHARS and name.isprintable()):
            raise InvalidRequest(
                f"'lora_name' must have 1 to {MAX_NAME_CHARS} printable characters", "lora_name"
            )
        if name in self._known and not in_place:
            raise in_use(name)
        if own_only:
            self.check_owner(name, owner)

    def check_owner(self, name: str, owner: str) -> None:
        """Raises PermissionDenied: another tenant has loaded what this name stands for."""
        version = self._known.find(name)
        if version is not None and version.owner != owner:
            raise PermissionDenied(f"{owner!r} has not loaded the adapter {name!r}")

    @contextmanager
    def loading(self, name: str, owner: str, most: int) -> Iterator[None]:
        """While the context is open, count an adapter as loaded. Raises AdaptersFull.

        `most`: of its owner's; 0: any number.
        """
        owners = {version.name: version.owner for version in self._known} | self._loading
        owners.pop(name, None)
        if len(owners) >= MAX_ADAPTERS:
            raise AdaptersFull(f"{len(owners)} adapters are loaded, as many as may be: unload one")
        own = sum(one == owner for one in owners.values())
        if most and own >= most:
            raise AdaptersFull(
                f"{owner!r} has loaded {own} adapters and may have {most}: unload one of them first"
            )
        self._loading[name] = owner
        try:
            yield
        finally:
            del self._loading[name]

    def check_bytes(self, name: str, num_bytes: int) -> None:
        """Raises AdaptersFull: all adapters would be too large together."""
        others = sum(version.num_bytes for version in self._known if version.name != name)
        if others + num_bytes > MAX_BYTES:
            raise AdaptersFull(
                f"the adapters would have {others + num_bytes} bytes, of {MAX_BYTES} that they may "
                "have: unload one"
            )


def not_found(name: str) -> ModelNotFound:
    """Return the error of a call that names an adapter which is not there."""
    return ModelNotFound(f"The lora adapter '{name[:128]}' cannot be found.", "lora_name")


def in_use(name: str) -> InvalidRequest:
    """Return the error of a load whose name stands for something already."""
    return InvalidRequest(
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
        "place, set 'load_inplace' to True.",
        "lora_name",
    )
