"""A model as the API sees it: names, text, grammars, embeddings, and who generates; and which model
a name means."""

from __future__ import annotations

import hashlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from coordinator.adapters.generator import AdaptedGenerator
from coordinator.adapters.known import Version
from coordinator.adapters.life import Adapters
from coordinator.generation import Generator
from coordinator.models.cascade import Cascade
from coordinator.models.embedding import EmbeddingModel
from coordinator.models.overview import whole_status
from coordinator.models.scoring import NO_SCORES, ScoringModel
from coordinator.models.texts import Text
from coordinator.text import Tokenizer
from coordinator.text.grammars import GrammarChecker
from coordinator.text.parts import ToolFormat
from pdserve import __version__
from pdserve.model_files.sampling_defaults import PLAIN, SamplingDefaults
from pdserve.protocol.status import ClusterStatus
from pdserve.settings.prices import Price
from pdserve.shared.errors import InvalidRequest, ModelNotFound, NoNodeAvailable

_NAMED_CHARACTERS = 8  # of a revision: as many as tell them apart, and as `pdserve revisions` takes


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The fingerprints of one served model."""

    model: str

    def of(self, revision: str) -> str:
        """Return that of one revision, whose first characters it has; empty: not known yet."""
        return _fingerprint(self.model, revision)


@lru_cache(maxsize=256)  # every event of a stream has it
def _fingerprint(model: str, revision: str) -> str:
    parts = (model, __version__, revision)
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]
    return f"fp_{revision[:_NAMED_CHARACTERS]}_{digest}" if revision else f"fp_{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel(ABC):
    """One model that clients may ask for."""

    names: tuple[str, ...]  # by which clients call it; the first is its own
    created: int  # seconds since 1970
    fingerprint: Fingerprint  # of its answers
    embedding: EmbeddingModel
    generator: Generator
    sampling: SamplingDefaults = PLAIN  # where a call does not say
    tenants: frozenset[str] = frozenset()  # who may use it; empty: everybody
    adapters: Adapters | None = None  # of it
    price: Price | None = None  # of its tokens; None: nothing is said
    root: str = ""  # where an adapter is from; empty: it is none
    parent: str | None = None  # the model that it is an adapter of

    def is_for(self, tenant: str) -> bool:
        """Return whether a tenant may use it."""
        return not self.tenants or tenant in self.tenants

    @property
    def name(self) -> str:
        """Its own name."""
        return self.names[0]

    def max_model_len(self) -> int:
        """Return the maximum number of tokens, prompt plus output, of a request.

        Raises NoNodeAvailable if no node has attached yet.
        """
        max_model_len = self.generator.max_model_len
        if max_model_len is None:
            raise NoNodeAvailable("no node has attached yet; try again later")
        return max_model_len

    @abstractmethod
    async def ready(self, until_s: float = math.inf) -> Model:
        """Return it with its tokenizer, which may have to be loaded.

        Args:
            until_s: when its caller gives up, of time.monotonic.

        Raises:
            TokenizerError: the tokenizer cannot be loaded.
            DeadlineExceeded, Overloaded: not in time.
        """

    @abstractmethod
    async def close(self) -> None:
        """End its processes and threads."""


@dataclass(frozen=True, slots=True)
class ReadText:
    """What a model's files say about its text."""

    text: Text
    tool_format: ToolFormat | None  # in which it writes tool calls; None: not known
    scoring: ScoringModel = NO_SCORES


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(ListedModel):
    """One that can be asked: whoever has it has its tokenizer, too."""

    read: ReadText

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        return self.read.text.tokenizer

    @property
    def grammars(self) -> GrammarChecker:
        """Checks grammars for its tokenizer."""
        return self.read.text.grammars

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format in which it writes tool calls; None: not known."""
        return self.read.tool_format

    @property
    def scoring(self) -> ScoringModel:
        """How it scores."""
        return self.read.scoring

    async def ready(self, until_s: float = math.inf) -> Model:
        """See ListedModel."""
        return self

    async def close(self) -> None:
        """See ListedModel."""
        await self.read.text.close()


def make_model(
    generator: Generator,
    tokenizer: Tokenizer,
    names: Sequence[str],
    *,
    tool_format: ToolFormat | None = None,
    embedding: EmbeddingModel | None = None,
    scoring: ScoringModel = NO_SCORES,
    sampling: SamplingDefaults = PLAIN,
    tenants: frozenset[str] = frozenset(),
    adapters: Adapters | None = None,
    price: Price | None = None,
) -> Model:
    """Return the model of these names, its own first, that `generator` computes.

    `tool_format`: None: that of its chat template.
    """
    if not names:
        raise ValueError("the model needs a name")
    return Model(
        names=tuple(names),
        created=int(time.time()),
        fingerprint=Fingerprint(names[0]),
        read=ReadText(Text(tokenizer), tool_format or tokenizer.tool_format, scoring),
        embedding=embedding or EmbeddingModel(),
        generator=generator,
        sampling=sampling,
        tenants=tenants,
        adapters=adapters,
        price=price,
    )


M = TypeVar("M", bound=ListedModel)


def adapted(base: M, version: Version, adapters: Adapters) -> M:
    """Return the model that an adapter makes of its base: all but who generates is the same."""
    return replace(
        base,
        names=(version.name,),
        created=version.created,
        fingerprint=Fingerprint(f"{base.fingerprint.model} {version.digest}"),
        generator=AdaptedGenerator(base.generator, version, adapters.begin),
        adapters=None,
        root=version.path,
        parent=base.name,
    )


def _anything(adapter: str) -> bool:
    return True


def _lacks(name: str, names: Sequence[str]) -> str:
    has = ", ".join(names) or "none that you may use"
    return f"there is no model {name[:128]!r}; this server has {has}"


class Catalog:
    """All models that clients may ask for, by each of their names, their adapters, and cascades."""

    def __init__(self, models: Sequence[ListedModel], cascades: Sequence[Cascade] = ()) -> None:
        """The first model is meant where a call names none."""
        self.default = models[0]
        self._models = tuple(models)
        self._by_name = {name: model for model in models for name in model.names}
        self._cascades = {name: cascade for cascade in cascades for name in cascade.names}

    def __iter__(self) -> Iterator[ListedModel]:
        return iter(self._models)

    def names(self, tenant: str = "") -> list[str]:
        """Return all names of all models that a tenant may use."""
        return [name for name, model in self._by_name.items() if model.is_for(tenant)]

    def cascades(self, tenant: str = "") -> dict[str, Cascade]:
        """Return the cascades of whose tiers a tenant may use all, by each of their names."""
        return {name: c for name, c in self._cascades.items() if self._is_for(c, tenant)}

    def cascade(self, name: object, tenant: str = "") -> Cascade | None:
        """Return the cascade of this name that a tenant may use; None: there is none."""
        found = self._cascades.get(name) if isinstance(name, str) else None
        return found if found is not None and self._is_for(found, tenant) else None

    def _is_for(self, cascade: Cascade, tenant: str) -> bool:
        if cascade.tenants and tenant not in cascade.tenants:
            return False
        return all(self._by_name[t.model].is_for(tenant) for t in cascade.tiers if t.model)

    async def close(self) -> None:
        """End the processes and threads of all, and close connections to elsewhere."""
        for model in self:
            await model.close()
        for endpoint in {e for c in self._cascades.values() for e in c.endpoints.values()}:
            await endpoint.close()

    def adapters(
        self, tenant: str = "", may_use: Callable[[str], bool] = _anything
    ) -> list[ListedModel]:
        """Return the adapters that a tenant may use; `may_use` says so of their names."""
        return [
            adapted(model, version, model.adapters)
            for model in self
            if model.adapters is not None and model.is_for(tenant)
            for version in model.adapters.known
            if may_use(version.name)
        ]

    def find(
        self,
        name: str | None,
        tenant: str = "",
        may_use: Callable[[str], bool] = _anything,
        call: bytes | None = None,
    ) -> ListedModel:
        """Return the model that a tenant's call asks for.

        Args:
            name: None: the call names none.
            tenant: whose call it is.
            may_use: whether that may use the adapter of a name.
            call: tells it from others under idempotency keys (`KnownAdapters.find`).

        Raises:
            ModelNotFound: there is none, or it is for others: nobody is told that it is there.
            NoNodeAvailable: it is an adapter that is not loaded yet.
            InvalidRequest: it is a cascade, and the call is not one that its tiers answer in turn.
        """
        if (cascade := self.cascade(name, tenant)) is not None:
            tiers = ", ".join(tier.name for tier in cascade.tiers)
            raise InvalidRequest(
                f"{name!r} is a cascade, and only generates: name one of its tiers ({tiers})",
                "model",
            )
        model = self.default if name is None else self._by_name.get(name)
        if model is None and name is not None and may_use(name):
            model = self._adapter(name, call)
        if model is None or not model.is_for(tenant):
            raise ModelNotFound(_lacks(name or self.default.name, self._told(tenant)), "model")
        return model

    def _told(self, tenant: str) -> list[str]:
        return [*self.names(tenant), *self.cascades(tenant)]

    def _adapter(self, name: str, call: bytes | None) -> ListedModel | None:
        for base in self:
            if base.adapters is not None:
                version = base.adapters.find(name, call)
                if version is not None:
                    return adapted(base, version, base.adapters)
        return None

    def status(self) -> ClusterStatus:
        """Return the state of all models and of their nodes."""
        return whole_status({model.name: model.generator.status() for model in self})

    def is_ready(self) -> bool:
        """Return whether a request for any of them could be served now."""
        return any(model.generator.is_ready() for model in self)
