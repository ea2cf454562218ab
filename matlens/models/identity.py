"""Which model a result belongs to, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from matlens.errors import InputError, checked
from matlens.io.bounds import LAYERS
from matlens.models.changes import changes_of, describe_changes, has_active_dropout
from matlens.models.registry import Family, ask, missing_repairs
from matlens.models.sites import Site
from matlens.models.tokens import token_policy
from matlens.models.weights import known_fingerprints, precision

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_IN_JSON = {"name": "base_model_name_or_path", "revision": "base_model_revision"}


@checked
@dataclass(frozen=True)
class ModelIdentity:
    """Which model something belongs to.

    Attributes
    ----------
    name, revision
        The model on the hub, or its path, and the commit.
    fingerprint, rounded
        Of all weights, and of the weights rounded to half precisions.
    tokens, token_policy
        How text becomes tokens, as a digest (None without a tokenizer) and a description.
    changes
        See `changes_of`; None for what is derived from the weights only.
    """

    name: str
    revision: str | None
    fingerprint: str
    tokens: str | None
    token_policy: str
    rounded: Mapping[str, str] = field(hash=False)
    dtype: str
    n_layers: int
    d_model: int
    changes: tuple[str, ...] | None = ()

    @classmethod
    def from_model(cls, model: TransformerBridge) -> ModelIdentity:
        """Look at a model as it is at this moment."""
        policy = token_policy(model)
        exact, rounded = known_fingerprints(model)
        return cls(
            name=str(model.cfg.model_name),
            revision=getattr(model, "matlens_revision", None),
            fingerprint=exact,
            tokens=policy.digest,
            token_policy=policy.words,
            rounded=rounded,
            dtype=str(precision(model)).removeprefix("torch."),
            n_layers=model.cfg.n_layers,
            d_model=model.cfg.d_model,
            changes=changes_of(model),
        )

    @property
    def of_weights(self) -> ModelIdentity:
        """The identity for values that depend on the weights only."""
        return replace(self, changes=None)

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that is equal for the same model under any name."""
        return (self.fingerprint, self.tokens)

    def same_but_rounded(self, other: ModelIdentity) -> bool:
        """Whether the one model's weights are the other's, rounded to its half precision."""
        narrow = {self.dtype, other.dtype} & self.rounded.keys() & other.rounded.keys()
        return any(self.rounded[k] == other.rounded[k] for k in narrow)

    def difference(self, other: ModelIdentity) -> str:
        """The difference to another model; empty if they are the same."""
        if self.fingerprint != other.fingerprint:
            if not self.same_but_rounded(other):
                return "weights or precision differ"
            return (
                f"the weights are the same but for their precision, {self.dtype} in the first and "
                f"{other.dtype} in the second. Where that is meant, use the maps with "
                "same_precision=False (as in MapSet.load(folder, same_precision=False))"
            )
        if self.tokens != other.tokens:
            words = f"{self.token_policy} in the first, {other.token_policy} in the second"
            if self.token_policy == other.token_policy:
                words = f"their vocabularies or special tokens differ ({self.token_policy} in both)"
            return (
                f"the weights are the same, but the same text becomes other tokens: {words}. Name how text "
                "becomes tokens with matlens.wrap(), or load both with matlens.load()"
            )
        if None not in (self.changes, other.changes) and self.changes != other.changes:
            return (
                f"the first has {describe_changes(self.changes)}, the second "
                f"{describe_changes(other.changes)}"
            )
        return ""

    def to_json(self) -> dict[str, Any]:
        """For files; the model's name has the key that adapters' files use."""
        return {_IN_JSON.get(key, key): value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelIdentity:
        """Read what `to_json` wrote."""
        names = {written: key for key, written in _IN_JSON.items()}
        try:
            given = {names.get(key, key): value for key, value in values.items()}
            changes = given.pop("changes")
            identity = cls(**given, changes=tuple(changes) if isinstance(changes, list) else changes)
        except (TypeError, AttributeError, KeyError, InputError) as error:
            raise InputError(f"The record of a model is damaged: {error}.") from error
        LAYERS.check(identity.n_layers, "The record of a model")
        return identity


@checked
@dataclass(frozen=True)
class Provenance:
    """Where vectors, maps, traces and clusters come from.

    Attributes
    ----------
    model
        None for what was made by hand.
    data, examples
        The corpus, the seed and the number of examples; the examples' fingerprint.
    details
        Other choices, such as the ridge of a fit or the seed of a trace.
    same_precision
        False allows the same weights in another precision. Not written into files.
    """

    model: ModelIdentity | None = None
    data: Mapping[str, Any] | None = None
    examples: str | None = None
    positions: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    same_precision: bool = field(default=True, compare=False)
    hooks: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)

    @property
    def identity(self) -> ModelIdentity:
        """The model; raises InputError if it is not known."""
        if self.model is None:
            raise InputError("The provenance must have a model, got none.")
        return self.model

    @property
    def corpus(self) -> str:
        """The name of the corpus, for tables."""
        return str((self.data or {}).get("corpus", "unnamed"))

    @property
    def n_samples(self) -> int | None:
        """How many samples maps were fitted on, where that is known."""
        number = self.details.get("n_fitted", self.details.get("n_samples"))
        return number if isinstance(number, int) else None

    def resolve(self, site: str | int | Site) -> Site:
        """The site of this model, by any of its names; a negative layer counts from the end."""
        resolved = Site.parse(site, None if self.model is None else self.model.n_layers)
        if resolved.is_hook and str(resolved) not in self.hooks:
            same = [name for name, names in self.hooks.items() if str(resolved) in names]
            return Site.parse(same[0]) if same else resolved
        return resolved

    @property
    def samples(self) -> Self:
        """Which rows these are, without further details."""
        return replace(self, details={})

    def with_details(self, **details: Any) -> Self:
        """The same provenance with further details."""
        return replace(self, details={**self.details, **details})

    def check_same(self, other: Provenance | ModelIdentity, *, ours: str, theirs: str = "this model") -> None:
        """Raise InputError unless both are of the same known model."""
        model = other.model if isinstance(other, Provenance) else other
        reason = "both must be known"
        if self.model is not None and model is not None:
            apart = self.same_precision and getattr(other, "same_precision", True)
            if not apart and self.model.same_but_rounded(model):
                model = replace(model, fingerprint=self.model.fingerprint)
            reason = self.model.difference(model)
            if not reason:
                return
        raise InputError(
            f"{ours[:1].upper()}{ours[1:]} and {theirs} do not belong together. Their models are "
            f"{_named(self.model)}, and {_named(model)}: {reason}. Make {ours} again for this model, or "
            f"load the model of {ours}."
        )

    def to_json(self, *keys: str) -> dict[str, Any]:
        """For files, or only these parts."""
        parts = {
            "model": None if self.model is None else self.model.to_json(),
            "data": None if self.data is None else dict(self.data),
            "examples": self.examples,
            "positions": self.positions,
            "hooks": {site: list(names) for site, names in self.hooks.items()} or None,
        }
        everything = {key: part for key, part in parts.items() if part is not None} | dict(self.details)
        return {key: everything[key] for key in keys} if keys else everything

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Provenance:
        """Read what `to_json` wrote."""
        details = dict(values)
        model, data = details.pop("model", None), details.pop("data", None)
        examples, positions = details.pop("examples", None), details.pop("positions", None)
        identity = None if model is None else ModelIdentity.from_json(model)
        return cls(identity, data, examples, positions, details, hooks=details.pop("hooks", {}))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Provenance:
        """Read a result's ``config.json``: its provenance, and how it was made."""
        request = dict(config["request"])
        made = {"software": config["software"], "command": config["command"]}
        return cls.from_json({**request.pop("provenance"), **request, **made})


def _named(model: ModelIdentity | None) -> str:
    return "not known" if model is None else f"{model.name!r} with the fingerprint {model.fingerprint}"


@checked
def check_raw(model: TransformerBridge) -> None:
    """Raise InputError for folded weights, dropout, or a bridge with wrong logits."""
    if reason := ask(Family.beyond_repair, model):
        raise InputError(
            f"TransformerLens does not compute {model.cfg.architecture} as transformers does: {reason}. Load "
            "it with matlens.load()."
        )
    if missing_repairs(model):
        raise InputError(
            f"TransformerLens does not compute {model.cfg.architecture} as transformers does. Load it with "
            "matlens.load(), or give the bridge to matlens.wrap() first, which corrects it."
        )
    if has_active_dropout(model):
        raise InputError(
            f"{model.cfg.model_name} must be in eval mode, got training mode with dropout. "
            "Call model.eval() first."
        )
    if model.compatibility_mode:
        raise InputError(
            "This bridge is in compatibility mode: its norms are folded and its weights centred, so "
            "its vectors are not those of the published model. Load it again with matlens.load() and "
            "do not call enable_compatibility_mode()."
        )
