"""Which model a name means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coordinator.models.model import Model
from pdserve.errors import ModelNotFound


class Catalog:
    """All models that clients may ask for, by each of their names."""

    def __init__(self, models: Sequence[Model]) -> None:
        """The first one is meant where a call names none."""
        self.default = models[0]
        self._models = tuple(models)
        self._by_name = {name: model for model in models for name in model.names}

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models)

    @property
    def names(self) -> list[str]:
        """All names of all models."""
        return list(self._by_name)

    def find(self, name: str | None) -> Model:
        """Return the model that a call asks for; None: it names none. Raises ModelNotFound."""
        if name is None:
            return self.default
        model = self._by_name.get(name)
        if model is None:
            raise ModelNotFound(
                f"there is no model {name[:128]!r}; this server has {', '.join(self._by_name)}",
                "model",
            )
        return model

    def is_ready(self) -> bool:
        """Return whether a request for any of them could be served now."""
        return any(model.generator.is_ready() for model in self)
