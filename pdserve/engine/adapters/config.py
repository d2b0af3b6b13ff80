"""What adapter_config.json says, as PEFT writes it: rank and scale of each module.

What changes the arithmetic and is not computed here is refused by name: an adapter without it would
answer, and answer wrongly.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdserve.engine.models.json_fields import JsonFields
from pdserve.shared.errors import AdapterRefused

CONFIG_FILE: Final = "adapter_config.json"
MOST_RANK: Final = 4096
MOST_TOKENS: Final = 4096  # that are trained, or that an aLoRA begins with
MOST_REPEATS: Final = 2  # of a pattern: work grows with a name's length to the power of one more
_REPEAT: Final = re.compile(r"[*+{]")
_REPEATED_GROUP: Final = re.compile(r"\)[*+{]")

_INVOCATION: Final = "alora_invocation_tokens"
# Fields that decide nothing here: where the adapter comes from, how it was trained, and which
# modules it has, which its tensors tell.
_IGNORED: Final = frozenset(
    [
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "target_modules",
        "exclude_modules",
        "lora_dropout",
        "modules_to_save",
        "layers_to_transform",
        "layers_pattern",
        "target_parameters",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
        "eva_config",
        "loftq_config",
        "corda_config",
        "lora_ga_config",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "lora_bias",
        "use_dora",
        "init_lora_weights",
        "trainable_token_indices",
        _INVOCATION,
    ]
)
# Of others, these are neutral.
_NEUTRAL: Final[tuple[object, ...]] = (None, False, "none", {}, [])
# Initialisations that change the model itself: A and B alone are not the adapter then.
_CHANGE_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
_WHY: Final = {
    "fan_in_fan_out": "the served models have no transposed matrices",
    "bias": "it replaces biases of the model",
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Ranks and scales."""

    where: str  # the file, for errors
    rank: int
    alpha: float
    ranks: dict[str, int]  # pattern |-> rank, in the file's order
    alphas: dict[str, float]  # likewise
    uses_rslora: bool
    has_bias: bool
    uses_dora: bool
    has_parameters: bool  # adapted as such, which gives routers' names another end
    trained_tokens: dict[str, tuple[int, ...]]  # end of a module's name |-> ids, as in its rows
    invocation: tuple[int, ...]  # aLoRA: tokens where it begins; (): it computes all

    def rank_of(self, module: str) -> int:
        """The rank of a module, by its whole name."""
        return int(_first(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What B (A x) is multiplied by."""
        rank = self.rank_of(module)
        alpha = float(_first(self.alphas, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)

    @property
    def canonical(self) -> bytes:
        """Equal for configs of the same arithmetic. The order of patterns is part of it."""
        ranks, alphas = [*self.ranks.items()], [*self.alphas.items()]
        said: list[object] = [
            self.rank,
            self.alpha,
            ranks,
            alphas,
            self.uses_rslora,
            self.has_bias,
        ]
        said += ["dora"] * self.uses_dora
        said += [["trained", self.trained_tokens]] if self.trained_tokens else []
        said += [["from", self.invocation]] if self.invocation else []
        return json.dumps(said).encode()

    def trained_in(self, module: str) -> tuple[int, ...]:
        """The tokens whose rows of a module it has, which is named whole."""
        trained = self.trained_tokens.items()
        return next((ids for end, ids in trained if f".{module}".endswith(f".{end}")), ())


def read_config(folder: Path) -> AdapterConfig:
    """Read an adapter's config. Raises AdapterRefused: there is none, or it is not served."""
    path = folder / CONFIG_FILE
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise AdapterRefused(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise AdapterRefused(f"{path} holds no JSON object")
    fields = JsonFields(content, str(path))
    kind = fields.raw("peft_type")
    if kind != "LORA":
        raise AdapterRefused(f"{path}: peft_type is {kind!r}; only LORA is served")
    _refuse_foreign(fields)
    return AdapterConfig(
        where=str(path),
        rank=fields.integer("r", maximum=MOST_RANK),
        alpha=fields.number("lora_alpha"),
        ranks=_patterns(fields, "rank_pattern", int),
        alphas=_patterns(fields, "alpha_pattern", float),
        uses_rslora=fields.boolean("use_rslora", False),
        has_bias=fields.boolean("lora_bias", False),
        uses_dora=fields.boolean("use_dora", False),
        has_parameters=bool(fields.texts("target_parameters")),
        trained_tokens=_trained_tokens(fields),
        invocation=_token_ids(fields.raw(_INVOCATION), _INVOCATION, path),
    )


def _trained_tokens(fields: JsonFields) -> dict[str, tuple[int, ...]]:
    key = "trainable_token_indices"
    said = fields.raw(key)
    by_module = said if isinstance(said, dict) else {"embed_tokens": said}
    found = {
        module: _token_ids(ids, f"{key} of {module}", fields.where)
        for module, ids in by_module.items()
    }
    for module, ids in found.items():
        if len(set(ids)) < len(ids):
            raise AdapterRefused(f"{fields.where}: {key} of {module} has a token twice")
    return {module: ids for module, ids in found.items() if ids}


def _token_ids(said: object, key: str, where: object) -> tuple[int, ...]:
    ids = [] if said is None else said
    if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
        raise AdapterRefused(f"{where}: {key} is {said!r}; it is a list of token ids")
    if len(ids) > MOST_TOKENS:
        raise AdapterRefused(f"{where}: {key} has {len(ids)} tokens; it may have {MOST_TOKENS}")
    return tuple(ids)


def _refuse_foreign(fields: JsonFields) -> None:
    for key in sorted(fields.keys()):
        if key not in _IGNORED and fields.raw(key) not in _NEUTRAL:
            why = _WHY.get(key, "it is not computed here")
            raise AdapterRefused(
                f"{fields.where}: {key} is {fields.raw(key)!r}, which is not served, as {why}"
            )
    init = fields.raw("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGE_BASE):
        raise AdapterRefused(
            f"{fields.where}: init_lora_weights is {init!r}, which changes the model's own weights "
            "on loading: save it as plain LoRA (path_initial_model_for_weight_conversion)"
        )


def _patterns(fields: JsonFields, key: str, kind: type) -> dict[str, Any]:
    nested = fields.nested(key)
    found: dict[str, Any] = {}
    for pattern in list(nested.keys()):
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterRefused(f"{nested.where}: {pattern!r} is no regex: {error}") from error
        if _REPEATED_GROUP.search(pattern) or len(_REPEAT.findall(pattern)) > MOST_REPEATS:
            raise AdapterRefused(
                f"{nested.where}: {pattern[:80]!r} may take for ever to match: repeat no group, "
                f"and have at most {MOST_REPEATS} repeats; most are names of modules"
            )
        found[pattern] = (
            nested.integer(pattern, maximum=MOST_RANK) if kind is int else nested.number(pattern)
        )
    return found


def _first(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """The first pattern counts that the name, or its end after a dot, matches."""
    matches = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(matches, default)
