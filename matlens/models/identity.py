"""Which model a result belongs to, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from matlens.errors import InputError, checked, warn
from matlens.io.bounds import LAYERS
from matlens.models.hooks import active_hooks, describe_hooks, has_active_dropout
from matlens.models.registry import Family, ask, missing_repairs
from matlens.models.sites import Site
from matlens.models.tokens import token_policy
from matlens.models.weights import configuration_digest, fingerprint, precision

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
    fingerprint, configuration
        Digests of sampled weights and of the configuration.
    tokens, token_policy
        How text becomes tokens, as a digest (None without a tokenizer) and a description.
    """

    name: str
    revision: str | None
    fingerprint: str
    configuration: str
    tokens: str | None
    token_policy: str
    dtype: str
    n_layers: int
    d_model: int

    @classmethod
    def from_model(cls, model: TransformerBridge) -> ModelIdentity:
        """The identity of a model as it is now; takes a few milliseconds."""
        policy = token_policy(model)
        return cls(
            name=str(model.cfg.model_name),
            revision=getattr(model, "matlens_revision", None),
            fingerprint=fingerprint(model),
            configuration=configuration_digest(model),
            tokens=policy.digest,
            token_policy=policy.words,
            dtype=str(precision(model)).removeprefix("torch."),
            n_layers=model.cfg.n_layers,
            d_model=model.cfg.d_model,
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the same model under any name."""
        return (self.fingerprint, self.configuration, self.tokens)

    def difference(self, other: ModelIdentity) -> str:
        """What differs from another model, for a message; empty if they are the same."""
        if self.shape != other.shape:
            ours, theirs = (
                f"{n_layers} layers, d_model {width}" for n_layers, width in (self.shape, other.shape)
            )
            return f"{ours} and {theirs}"
        if self.dtype != other.dtype:
            return f"precision: {self.dtype} and {other.dtype}"
        if self.configuration != other.configuration:
            return "configuration"
        if self.fingerprint != other.fingerprint:
            return "weights"
        if self.tokens != other.tokens:
            if self.token_policy == other.token_policy:
                return f"tokens: another vocabulary or other special tokens ({self.token_policy} in both)"
            return f"tokens: {self.token_policy} and {other.token_policy}"
        return ""

    @property
    def shape(self) -> tuple[int, int]:
        """``(n_layers, d_model)``."""
        return self.n_layers, self.d_model

    def to_json(self) -> dict[str, Any]:
        """For files; the model's name has the key that adapters' files use."""
        return {_IN_JSON.get(key, key): value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelIdentity:
        """Read what `to_json` wrote."""
        names = {written: key for key, written in _IN_JSON.items()}
        try:
            identity = cls(**{names.get(key, key): value for key, value in values.items()})
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
    hooks
        The TransformerLens hooks of each site.
    active_hooks
        What changed the model's passes, see `active_hooks`.
    """

    model: ModelIdentity | None = None
    data: Mapping[str, Any] | None = None
    examples: str | None = None
    positions: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    hooks: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)
    active_hooks: tuple[str, ...] = ()

    @classmethod
    def from_model(cls, model: TransformerBridge, **parts: Any) -> Self:
        """The provenance of what this model's passes give now, with what changes them."""
        return cls(ModelIdentity.from_model(model), active_hooks=active_hooks(model), **parts)

    @property
    def identity(self) -> ModelIdentity:
        """The model; raises InputError if it is not known."""
        if self.model is None:
            raise InputError("The provenance must have a model, got none.")
        return self.model

    @property
    def model_name(self) -> str:
        """The name of the model for tables and titles, with what changed its passes."""
        return f"{self.identity.name}{' with ' if self.modification else ''}{self.modification}"

    @property
    def modification(self) -> str:
        """What changed the model's passes, for titles; empty if nothing did."""
        return describe_hooks(self.active_hooks) if self.active_hooks else ""

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
        difference = "an unknown model"
        if self.model is not None and model is not None:
            difference = self.model.difference(model)
            if not difference:
                return
        raise InputError(
            f"{ours[:1].upper()}{ours[1:]} and {theirs} must be of the same model, got "
            f"{_named(self.model)} and {_named(model)}, which differ ({difference}). Make {ours} again for "
            "this model, or use on(model, strict=False)."
        )

    def on(self, model: ModelIdentity, *, ours: str, strict: bool = True) -> Self:
        """The same provenance on a model; with ``strict=False`` also on another model of the same shape.

        The other model then replaces this one, with one InputWarning; ``details["transferred_from"]`` records
        the original and what differs, after several transfers one inside the other. An unknown model is
        replaced without a warning.
        """
        if self.model is None:  # made by hand
            return replace(self, model=model)
        if not (difference := self.model.difference(model)):
            return self
        if strict or self.model.shape != model.shape:
            self.check_same(model, ours=ours)
        name, fingerprint = self.model.name, self.model.fingerprint
        warn(f"Using {ours} of {name} on {model.name}, although they differ ({difference}).")
        record = {"model": name, "fingerprint": fingerprint, "differs": difference, **self.transfer}
        return replace(self, model=model, details={**self.details, "transferred_from": record})

    @property
    def transfer(self) -> dict[str, Any]:
        """``transferred_from`` alone, for records of results; empty if the model is the original one."""
        return {key: self.details[key] for key in ("transferred_from",) if key in self.details}

    def to_json(self, *keys: str) -> dict[str, Any]:
        """For files, or only these parts."""
        parts = {
            "model": None if self.model is None else self.model.to_json(),
            "data": None if self.data is None else dict(self.data),
            "examples": self.examples,
            "positions": self.positions,
            "hooks": {site: list(names) for site, names in self.hooks.items()} or None,
            "active_hooks": list(self.active_hooks) or None,
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
        hooks, active = details.pop("hooks", {}), tuple(details.pop("active_hooks", ()))
        return cls(identity, data, examples, positions, details, hooks, active)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Provenance:
        """Read a result's ``config.json``: its provenance, and how it was made."""
        request = dict(config["request"])
        made = {"software": config["software"], "command": config["command"]}
        return cls.from_json({**request.pop("provenance"), **request, **made})


def _named(model: ModelIdentity | None) -> str:
    return "an unknown model" if model is None else f"{model.name!r} ({model.dtype}, {model.fingerprint})"


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
