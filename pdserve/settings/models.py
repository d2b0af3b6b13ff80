"""The models of a cluster that serves several: a TOML file that its coordinators and nodes read.

shared = { decode = 1 }       # nodes that no model has for itself; with at_once = 2: of two models

[models.small]
source = "models/small"       # as --model; or below the folder of this file
aliases = ["gpt-4o-mini"]
min = { prefill = 1, decode = 1 }
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from pdserve.settings.cascades import RegisteredCascade, check_cascades
from pdserve.settings.config import CheckpointConfig, EngineConfig, NodeConfig, WeightsConfig
from pdserve.settings.external import ExternalEndpoint, check_external, here
from pdserve.settings.places import MOST_PLACES
from pdserve.settings.prices import Price
from pdserve.settings.struct import ConfigStruct
from pdserve.settings.values import parse_bytes
from pdserve.shared.errors import ConfigError
from pdserve.shared.hints.near import nearest

_NAME: Final = re.compile(r"[^\s\x00-\x1f\x7f\"']{1,128}")
_NumNodes = Annotated[int, Meta(ge=0, le=1024)]
_Kind: TypeAlias = Literal["prefill", "decode"]
# What of a node's engine a model may say for itself, by the same names.
_OF_ENGINE: Final = (
    "dtype",
    "quantization",
    "kv_dtype",
    "wire_dtype",
    "max_model_len",
    "kv_memory",
)


class NumNodes(ConfigStruct, frozen=True):
    """How many nodes of each pool."""

    prefill: _NumNodes = 0
    decode: _NumNodes = 0


class RegisteredModel(ConfigStruct, frozen=True):
    """One `[models.NAME]`."""

    source: Annotated[str, Meta(min_length=1)]  # as --model
    revision: str | None = None  # as --revision
    digest: str = ""  # what its checkpoint's revision begins with; empty: it may be any
    aliases: list[str] = msgspec.field(default_factory=list)
    chat_template: str = ""  # a file; empty: the checkpoint's own
    dtype: str | None = None  # None of these: what the node has been started with
    quantization: str | None = None
    kv_dtype: str | None = None
    wire_dtype: str | None = None
    max_model_len: int | None = None
    kv_memory: str | None = None
    min: NumNodes = NumNodes(prefill=1, decode=1)  # nodes that are always its own
    tenants: list[str] = msgspec.field(default_factory=list)  # who may use it; empty: all
    price: Price | None = None

    @property
    def checkpoint(self) -> WeightsConfig:
        """Where its files are."""
        return WeightsConfig(model=self.source, revision=self.revision)

    def engine(self, of_node: EngineConfig) -> EngineConfig:
        """Return a node's engine as it runs this model. Raises ConfigError: it cannot be so."""
        own = {name: value for name in _OF_ENGINE if (value := getattr(self, name)) is not None}
        try:
            return msgspec.convert(msgspec.to_builtins(of_node) | own, EngineConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(str(error)) from error


class SharedNodes(NumNodes, frozen=True):
    """Nodes that are any model's, by demand."""

    at_once: Annotated[int, Meta(ge=1, le=MOST_PLACES)] = 1  # models that are awake on each
    memory: str = "auto"  # of each such node, for weights and KV of all; auto: half of what is left


class StartedNode(NamedTuple):
    """A node as it begins."""

    model: str
    shared: int | None = None  # which of several shared nodes it is a place of; None: of none
    place: int = 0  # its number there


class ModelsFile(ConfigStruct, frozen=True):
    """The whole file."""

    models: Annotated[dict[str, RegisteredModel], Meta(min_length=1)]
    shared: SharedNodes = SharedNodes()
    cascades: dict[str, RegisteredCascade] = msgspec.field(default_factory=dict)
    external: dict[str, ExternalEndpoint] = msgspec.field(default_factory=dict)

    def find(self, name: str) -> tuple[str, RegisteredModel]:
        """Return the model of this name or alias, with its own name. Raises ConfigError."""
        for own, model in self.models.items():
            if name == own or name in model.aliases:
                return own, model
        raise ConfigError(f"there is no model {name!r}{nearest(name, self.models)}")

    def nodes(self, kind: _Kind) -> Iterator[StartedNode]:
        """Yield how each node of a pool begins: each model's own, then shared ones."""
        for name, model in self.models.items():
            yield from [StartedNode(name)] * getattr(model.min, kind)
        names, places = list(self.models), self.shared.at_once
        for number in range(getattr(self.shared, kind)):
            if places == 1:
                yield StartedNode(names[0])
            else:
                yield from (StartedNode(names[i], number, i) for i in range(places))


def read_models(file: str) -> ModelsFile:
    """Read the file, and check it.

    Raises:
        ConfigError: it cannot be read, or what it says cannot be; says where.
    """
    path = Path(file).expanduser()
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the models file {path}: {error}") from error
    return parse_models(text, path)


def parse_models(text: str, path: Path) -> ModelsFile:
    """Read what is, or is to be, in the file at `path`. Raises as `read_models`."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"cannot read the models file {path}: {error}") from error
    try:
        found = msgspec.convert(values, ModelsFile)
        _check(found)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{path}: {_where(error, values)}") from error
    folder = path.parent
    models = {name: _from(folder, model) for name, model in found.models.items()}
    cascades = {name: _classified(folder, cascade) for name, cascade in found.cascades.items()}
    external = {name: here(folder, endpoint) for name, endpoint in found.external.items()}
    return replace(found, models=models, cascades=cascades, external=external)


class NodeOfModel(NamedTuple):
    """A node as it is with one model of its file."""

    config: NodeConfig
    name: str = ""  # of the model; empty: there is no such file
    # Others that it could serve instead: none where ranks in other processes or on other hosts have
    # loaded the model, too.
    others: Sequence[str] = ()
    digest: str = ""  # what the revision of its checkpoint has to begin with

    def check_digest(self, revision: str) -> None:
        """Raise ConfigError: it is pinned to other files than those of `revision`."""
        if not revision.startswith(self.digest):
            raise ConfigError(
                f"{self.config.models}: models.{self.name} is pinned to {self.digest[:12]}, but "
                f"its files are {revision[:12]}: bring the old ones back, or pin it anew (pdserve "
                "models)"
            )


def node_of_model(config: NodeConfig) -> NodeOfModel:
    """Return a node as it is with its model; without a file of models, as it was.

    Raises:
        ConfigError: as `read_models`, or the file has no such model.
    """
    if not config.models:
        return NodeOfModel(config)
    file = read_models(config.models)
    name, model = file.find(config.checkpoint.model or next(iter(file.models)))
    engine = model.engine(config.engine)
    has_ranks = engine.tensor_parallel > 1 or engine.pipeline_parallel > 1 or engine.rank_hosts
    others = [] if has_ranks else [other for other in file.models if other != name]
    found = replace(config, checkpoint=model.checkpoint, engine=engine)
    return NodeOfModel(found, name, others, model.digest)


def _check(file: ModelsFile) -> None:
    """Raise ConfigError: a name is none, or means two models; or an engine cannot be so."""
    meant: dict[str, str] = {}  # name |-> whose it is
    for name, model in file.models.items():
        _check_names(meant, f"models.{name}", (name, *model.aliases))
        try:
            model.engine(EngineConfig())
        except ConfigError as error:
            raise ConfigError(f"models.{name}: {error}") from error
    models = set(meant)
    _check_shared(file)
    for name, cascade in file.cascades.items():
        _check_names(meant, f"cascades.{name}", (name, *cascade.aliases))
    names = meant.keys() - models
    for name in file.external:
        _check_names(meant, f"external.{name}", (name,))
    check_external(file.external)
    check_cascades(file.cascades, models, names, file.external)


def _check_shared(file: ModelsFile) -> None:
    shared = file.shared
    if shared.at_once > len(file.models):
        raise ConfigError(
            f"shared.at_once {shared.at_once}: there are {len(file.models)} models to be awake"
        )
    if shared.memory != "auto":
        if shared.at_once == 1:
            raise ConfigError("shared.memory is for several models at once: give at_once, too")
        try:
            size = parse_bytes(shared.memory)
        except ConfigError as error:
            raise ConfigError(f"shared.memory: {error}") from error
        if not size:
            raise ConfigError("shared.memory 0: models need some, as 8GiB, or auto")


def _check_names(meant: dict[str, str], owner: str, names: Iterable[str]) -> None:
    """Note whose these names are. Raises ConfigError."""
    for called in names:
        if not _NAME.fullmatch(called):
            raise ConfigError(
                f"{owner}: {called!r} is no name: up to 128 characters, without spaces"
            )
        if called in meant:
            what = "twice" if meant[called] == owner else f"of {meant[called]}, too"
            raise ConfigError(f"{owner}: {called!r} is a name {what}: each means one")
        meant[called] = owner


def _where(error: Exception, values: dict[str, Any]) -> str:
    """Say what is wrong; msgspec says `[...]` for the key of a mapping."""
    text = str(error)
    kinds = (("models", RegisteredModel), ("cascades", RegisteredCascade))
    for table, kind in (*kinds, ("external", ExternalEndpoint)):
        if f"$.{table}[...]" in text:
            for name, entry in values[table].items():
                try:
                    msgspec.convert(entry, kind)
                except msgspec.ValidationError as inner:
                    return f"{table}.{name}: {inner}"
    return text


def _from(folder: Path, model: RegisteredModel) -> RegisteredModel:
    """Have paths that begin at the file's folder begin at the root."""
    found = {
        name: str((folder / value).resolve())
        for name in ("source", "chat_template")
        if (value := getattr(model, name)) and (folder / value).exists()
    }
    return replace(model, **found)


def _classified(folder: Path, cascade: RegisteredCascade) -> RegisteredCascade:
    """Have the files of its classifiers begin at the root, as `_from` has those of models."""
    tiers = [
        replace(tier, escalate=replace(rule, classifier=str(folder / rule.classifier)))
        if (rule := tier.escalate) is not None and rule.classifier
        else tier
        for tier in cascade.tiers
    ]
    return replace(cascade, tiers=tiers)


def check_alone(file: str, checkpoint: CheckpointConfig) -> None:
    """Raise ConfigError if a model is named beside a file of models."""
    for name in ("model", "revision", "served_model_name"):
        if getattr(checkpoint, name):
            flag = name.replace("_", "-")
            raise ConfigError(f"--models {file} with --{flag}: the file says what is served")
