"""Lenses: a map from every layer to the last, with the model's readout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import pandas as pd
from jaxtyping import Bool, Float
from torch import Tensor

from matlens.activations.activations import Activations, Positions
from matlens.activations.collecting import collect
from matlens.data.corpus import Corpus, as_corpus
from matlens.data.examples import Examples
from matlens.data.making import Prompt, choose_prompt, make_examples
from matlens.errors import InputError, PositiveInt, Seed, checked
from matlens.io.repository import HubRepository
from matlens.lens import files, trained
from matlens.lens.closed_forms import fit_closed_forms, layers_read, resolve_layers
from matlens.lens.config import Method, parse_methods
from matlens.lens.hub import pull_lens, push_lens
from matlens.lens.maps import LensMaps, maps_on
from matlens.lens.trajectory import Trajectory, read_trajectory
from matlens.linear.mapsets import MapSet
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.readout import Readout, check_vectors
from matlens.models.sites import STREAM, Site
from matlens.models.tokens import Messages

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Data = Corpus | Sequence[str] | Examples | Activations
Layer = int | str | Site


@checked
@dataclass(frozen=True, eq=False)
class Lens(LensMaps):
    """A map for each layer ``l`` that approximates ``h^L`` from ``h^l``, with the readout.

    ``lens(h, layer)`` maps vectors. A lens that is *on* a model reads them out too: one that was just fitted,
    one that was loaded with it, or ``lens.on(model)``.

    Attributes
    ----------
    maps
        The map of each layer, from ``0`` to ``L - 1``, ``None`` for the identity; layers may be absent.
        ``h^L`` itself is read unchanged.
    method
        How it was fitted, such as ``"mat"`` or ``"standardise+rank=64"``.
    provenance
        The model, the corpus, and how much of it. A lens goes with this model alone.
    norm
        Standardization of ``h^l`` before its map, for lenses between standardized vectors.
    scales
        Factors on the scores by layer, 1 where there is none.
    readout, model
        The model that the lens is on and its readout, or ``None``.
    """

    readout: Readout | None = field(default=None, repr=False)
    model: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.readout is not None:
            self.readout.check_same(self.provenance, theirs="the lens")
            object.__setattr__(self, "maps", maps_on(self.maps, self.readout.device))

    def __repr__(self) -> str:
        identity, layers = self.provenance.identity, self.layers
        read = f"layers {layers[0]} to {layers[-1]} of {identity.n_layers}"
        placed = "" if self.readout is not None else ", on no model"
        return f"Lens({self.method!r}, {read}, {identity.name!r}{placed})"

    @classmethod
    def identity(cls, model: TransformerBridge) -> Lens:
        """The logit lens of a model (``id``): every layer is read unchanged."""
        maps = dict.fromkeys(range(model.cfg.n_layers))
        return cls(maps, "id", Provenance(ModelIdentity.from_model(model))).on(model)

    @classmethod
    def from_maps(cls, maps: MapSet, *, model: TransformerBridge | None = None) -> Lens:
        """A lens, ``mat``, of those maps of a set that go onto the last layer."""
        last = maps.provenance.identity.n_layers
        onto_last = {layer: maps[layer, last] for layer in range(last) if (layer, last) in maps}
        if not onto_last:
            raise InputError(f"maps must have a map to the last layer, {Site(STREAM, last)}, got none.")
        return cls(onto_last, "mat", maps.provenance).on(model)

    @overload
    @classmethod
    def fit(
        cls, model: TransformerBridge, corpus: Data, *, method: Method = "mat", **options: Any
    ) -> Lens: ...

    @overload
    @classmethod
    def fit(
        cls, model: TransformerBridge, corpus: Data, *, method: Sequence[Method], **options: Any
    ) -> dict[str, Lens]: ...

    @classmethod  # type: ignore[misc]  # the overloads do not repeat the options
    def fit(
        cls,
        model: TransformerBridge,
        corpus: Data,
        *,
        method: Method | Sequence[Method] = "mat",
        positions: Positions = "all",
        rows: Bool[Tensor, " n"] | None = None,
        weights: Float[Tensor, " n"] | None = None,
        layers: Sequence[int] | None = None,
        seed: Seed = 0,
        batch_tokens: PositiveInt | None = None,
        n_prompts: PositiveInt = trained.PROMPTS,
        longest: PositiveInt = trained.LONGEST,
        folder: str | Path | None = None,
        progress: bool = True,
    ) -> Lens | dict[str, Lens]:
        """Fit a lens, or several closed forms in one pass over the data.

        Parameters
        ----------
        method
            A `LensConfig`, or a name: ``mat``, least squares; ``affine``, with an intercept; ``scaled``, the
            best closed form with a factor on its scores; ``polished``, that improved by steps down the
            divergence from the model's distribution; ``tuned``, trained from the identity as the package
            tuned-lens does; ``jacobian``, the mean Jacobian, by TransformerLens; or the name of a method that
            another package adds. A list gives a dict of lenses by name.
        positions
            ``"all"``: at every token. ``"sampled"``: at the positions of the examples, which are the masks
            of a masked-LM model.
        rows, weights
            For closed forms: True for the samples to fit on, by default all, and how much each of all samples
            counts, in the order of `collect` at these positions.
        seed
            For sampled positions, and the samples and tokens that training samples.
        n_prompts, longest
            Number of sentences for Jacobians, those with the most words, and the tokens that each is
            truncated to.
        folder
            Folder for the vectors of trained lenses, by default in memory; it can be removed afterwards.
            Closed forms write none.
        """
        methods, n_layers = parse_methods(method), int(model.cfg.n_layers)
        requested = resolve_layers(layers, n_layers)
        configs = [config for config in methods.values() if config is not None]
        on_vectors = [name for name in methods if methods[name] is None and name not in ("id", "jacobian")]
        if len(configs) + ("id" in methods) < len(methods) and (rows is not None or weights is not None):
            raise InputError("rows and weights must be None for trained lenses.")
        data = corpus if isinstance(corpus, Examples | Activations) else as_corpus(corpus)
        fitted = {"id": LensMaps(dict.fromkeys(requested), "id", Provenance(ModelIdentity.from_model(model)))}
        if "jacobian" in methods:
            if not isinstance(data, Corpus):
                raise InputError("corpus must be a Corpus for 'jacobian', which is fitted on sentences.")
            fitted["jacobian"] = trained.fit_jacobian(
                model, data, layers=requested, n_prompts=n_prompts, longest=longest, progress=progress
            )
        if isinstance(data, Corpus) and (configs or on_vectors):
            data = make_examples(model, data, seed=seed)
        needed = layers_read(configs, requested, n_layers)
        if on_vectors and isinstance(data, Examples):
            data = collect(
                model, data, needed, positions=positions, folder=folder, batch_tokens=batch_tokens,
                progress=progress,
            )  # fmt: skip
        if isinstance(data, Activations) and {*methods} != {"id"}:
            data.provenance.check_same(ModelIdentity.from_model(model), ours="the activations")
            if absent := [f"h.{layer}" for layer in needed if f"h.{layer}" not in data]:
                raise InputError(f"The activations lack {', '.join(absent)}. Collect these sites too.")
        if configs and not isinstance(data, Corpus):
            fitted |= fit_closed_forms(
                model, data, configs, layers=requested, positions=positions, rows=rows, weights=weights,
                batch_tokens=batch_tokens, progress=progress,
            )  # fmt: skip
        readout = Readout(model)
        for name in on_vectors:
            assert isinstance(data, Activations)
            fitted[name] = trained.fit_on_vectors(
                name, readout, model, data, layers=requested, seed=seed, progress=progress
            )
        lenses = {name: cls(**vars(fitted[name]), readout=readout, model=model) for name in methods}
        return next(iter(lenses.values())) if isinstance(method, Method) else lenses

    @property
    def n_layers(self) -> int:
        """``L``, the number of blocks of the model; those mapped can be read, and ``L``."""
        return self.provenance.identity.n_layers

    def resolve(self, layer: Layer) -> int:
        """The number of a layer that this lens reads: negative ones count from the end."""
        site = self.provenance.resolve(layer)
        if site.kind != STREAM:
            raise InputError(f"layer must be a layer of the residual stream, such as 5 or 'h.5', got {site}.")
        if site.layer != self.n_layers and site.layer not in self.maps:
            there = ", ".join(map(str, self.maps))
            raise InputError(f"layer must be one of {there}, got {site.layer}.")
        return site.layer

    def __call__(self, h: Float[Tensor, "... d_model"], layer: Layer) -> Float[Tensor, "... d_model"]:
        """The approximation of ``h^L`` from vectors ``h^l``, in float32; differentiable in ``h``."""
        check_vectors(h, self.provenance.identity.d_model)
        layer = self.resolve(layer)
        if layer == self.n_layers:
            return h.float()
        h, linear = h.float() if self.norm is None else self.norm(h.float()), self.maps[layer]
        return h if linear is None else linear(h)

    def logits(
        self, h: Float[Tensor, "... d_model"], layer: Layer, *, gradients: bool = False
    ) -> Float[Tensor, "... d_vocab"]:
        """Logits of vectors ``h^l``, read out by the model's head, in float32.

        With ``gradients`` they can be differentiated in ``h``; the model's weights are constants.
        """
        readout, layer = self.on_readout, self.resolve(layer)
        logits = readout.logits(self(h.to(readout.device), layer), gradients=gradients)
        scale = self.scales.get(layer, 1.0)
        return logits if scale == 1 else logits * scale

    @property
    def on_readout(self) -> Readout:
        """The readout of the model that the lens is on."""
        if self.readout is None:
            raise InputError(
                "This lens has no model, so it cannot be read out. Set its model with "
                "lens.on(model), or load it with Lens.load(folder, model)."
            )
        return self.readout

    def on(self, model: TransformerBridge | None, *, strict: bool = True) -> Lens:
        """The same lens on the model that it was fitted on, or on none.

        Hooks, patches and steering may be active. With ``strict=False`` another model of the same shape is
        accepted, such as a fine-tuned or quantized version: an InputWarning says what differs, and
        ``provenance.details["transferred_from"]`` records it.
        """
        if model is None:
            return self
        provenance = self.provenance.on(ModelIdentity.from_model(model), ours="the lens", strict=strict)
        maps = {
            layer: linear and replace(linear, provenance=provenance) for layer, linear in self.maps.items()
        }
        return replace(self, maps=maps, provenance=provenance, readout=Readout(model), model=model)

    def trajectory(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        k: int = 5,
        layers: Sequence[Layer] | None = None,
    ) -> Trajectory:
        """Predict at every token of a prompt and every layer, see `Trajectory`.

        Parameters
        ----------
        prompt
            A text, or token ids that are read as they are; in a masked-LM model with one mask in it.
        messages
            In place of a prompt, a conversation such as ``[{"role": "user", "content": "Hello"}]``, read
            through the tokenizer's chat template up to where the model answers.
        k
            Number of tokens of each prediction.
        layers
            Layers of the lens, by default all; the last one is always read.
        """
        return read_trajectory(self, choose_prompt(prompt, messages), k=k, layers=layers)

    def save(self, folder: str | Path) -> None:
        """Write a safetensors file for each layer, and ``config.json`` when all are there."""
        files.write_lens(folder, self)

    @classmethod
    def load(cls, folder: str | Path, model: TransformerBridge | None = None, *, strict: bool = True) -> Lens:
        """Load a lens of `save`, and verify it; on a model, see `on`."""
        return cls(**vars(files.read_lens(folder))).on(model, strict=strict)

    def push_to_hub(
        self,
        repository: str,
        *,
        name: str | None = None,
        quality: pd.DataFrame | None = None,
        private: bool = False,
        endpoint: str | None = None,
        token: str | None = None,
    ) -> str:
        """Push the lens to a hub repository, which may hold many lenses, in one commit.

        Its card is written from its provenance: model, corpus, tokens, attention sinks.

        Parameters
        ----------
        repository
            Such as ``"someone/lenses"``; it is created if there is none, ``private`` or not.
        name
            The folder of the lens, by default ``model/method/corpus``; replaced if it exists.
        quality
            A table of `lens.evaluate_lenses` with this lens by its ``method``, for the card.
        endpoint, token
            By default those of the hub's own client.

        Returns
        -------
        commit
            The commit, for `from_pretrained(revision=...)`.
        """
        place = HubRepository(repository, endpoint, token)
        return push_lens(self, place, name=name, quality=quality, private=private)

    @classmethod
    def from_pretrained(
        cls,
        repository: str,
        name: str | None = None,
        model: TransformerBridge | None = None,
        *,
        revision: str | None = None,
        strict: bool = True,
        endpoint: str | None = None,
        token: str | None = None,
    ) -> Lens:
        """Load a lens from a hub repository; checksums are verified, no code is executed.

        ``lens.provenance.details["hub"]["commit"]`` is the commit that it was read at.

        Parameters
        ----------
        repository
            Such as ``"someone/lenses"``.
        name
            The folder of the lens, by default the only one; or a ``.pt`` file of TransformerLens'
            `JacobianLens`, such as ``neuronpedia/jacobian-lens`` has.
        model, strict
            The model to put it on, see `on`; a ``.pt`` file needs one.
        revision
            A commit, which makes it the same lens for good; or a branch or a tag, by default ``main``.
        endpoint, token
            By default those of the hub's own client.
        """
        place = HubRepository(repository, endpoint, token)
        lens = cls(**vars(pull_lens(place, name, revision=revision, model=model, strict=strict)))
        return lens.on(model, strict=strict)

    @classmethod
    def from_jacobian_lens(cls, path: str | Path, model: TransformerBridge, *, strict: bool = True) -> Lens:
        """Read a `JacobianLens` file of TransformerLens; no code in it is executed.

        Its layer ``l``, the output of block ``l``, is ``l + 1`` here. For ``strict`` see `on`; a file that
        `to_jacobian_lens` did not write records too little for ``strict=False``.
        """
        return cls(**vars(files.read_jacobian_lens(path, model, strict=strict))).on(model, strict=strict)

    def to_jacobian_lens(self, path: str | Path) -> None:
        """Write the maps as a file that TransformerLens' `JacobianLens.load` reads, in float32.

        Its readout, steering, ablation and swaps then work on them. Layer ``l`` is ``l - 1`` there; layer 0
        is not in such a file.
        """
        files.write_jacobian_lens(path, self)

    @classmethod
    def from_tuned_lens(cls, folder: str | Path, model: TransformerBridge) -> Lens:
        """Read a lens of the package tuned-lens; no code in it is executed."""
        return cls(**vars(files.read_tuned_lens(folder, model))).on(model)
