"""Members of the report: lenses fitted one by one on the same rows, with what each took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from matlens.activations.activations import Activations
from matlens.data.corpus import Corpus
from matlens.errors import InputError, PositiveInt, Seed, checked, short
from matlens.lens.costs import closed_form_flops, jacobian_flops, training_flops
from matlens.lens.fitting import lens_moments
from matlens.lens.jacobian import LONGEST, fit_jacobian
from matlens.lens.lens import Lens
from matlens.lens.methods import Method
from matlens.lens.report import Member
from matlens.lens.trained import (
    JACOBIAN,
    ON_ROWS,
    best_start,
    check_method_names,
    closed_forms,
    train_maps,
)
from matlens.lens.training import BATCH, PILOT, STEPS, TOKENS, passes_for, steps_for
from matlens.models.identity import ModelIdentity
from matlens.models.readout import Readout
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

METHODS = (
    "id", "mat", "affine", "ridge-identity", "weighted", "normed", "normed+affine", "scaled", "polished"
)  # fmt: skip
"""What is reported on unless other methods are asked for; ``tuned`` and ``jacobian`` take minutes a layer."""


class _Clock:
    seconds = 0.0


@contextmanager
def _timed() -> Iterator[_Clock]:
    clock, start = _Clock(), time.process_time()
    try:
        yield clock
    finally:
        clock.seconds = time.process_time() - start


@checked
def default_methods(model: TransformerBridge) -> list[str]:
    """What is reported on of a model unless other methods are asked for: `METHODS` that it can read."""
    readable = best_start(model) != "affine"
    return [name for name in METHODS if readable or not name.startswith("normed")]


@checked
def fit_members(
    model: TransformerBridge,
    train: Activations,
    methods: Sequence[str] = METHODS,
    *,
    layers: Sequence[int] | None = None,
    prompts: Corpus | None = None,
    longest: PositiveInt = LONGEST,
    seed: Seed = 0,
    progress: bool = True,
) -> dict[str, Member]:
    """Fit lenses on the same rows and measure what each takes.

    A lens is charged with all that it needs but for collecting: ``polished`` with the closed form that it
    starts from, and each closed form with the moments that it shares with others.

    Parameters
    ----------
    model
        The model.
    train
        Vectors of the layers and of the last one.
    methods
        Names of closed forms, see `Lens.fit`; ``scaled``, the best of them with one factor on its scores;
        ``polished``, that with steps down the divergence; ``tuned``, trained from the identity; and
        ``jacobian``.
    layers
        The layers, by default all but the last.
    prompts, longest
        What Jacobians are taken on, and the tokens that a prompt is cut to.
    seed
        Of the rows and tokens that training draws.
    progress
        Whether to show bars.

    Raises
    ------
    InputError
        A name is none, the rows lack a layer, or ``jacobian`` has no prompts.
    """
    names = check_method_names(methods)
    train.provenance.check_same(ModelIdentity.from_model(model), ours="the activations")
    if JACOBIAN in names and prompts is None:
        raise InputError("The method 'jacobian' is fitted on prompts, and none are given. Expected a corpus.")
    last = int(model.cfg.n_layers)
    wanted = list(range(last)) if layers is None else sorted({train.resolve(layer).layer for layer in layers})
    absent = [layer for layer in [*wanted, last] if f"h.{layer}" not in train]
    if absent or not wanted:
        raise InputError(f"The rows lack the layers {short(absent)}. Collect these sites too.")
    start = best_start(model)
    fitted = _fit_closed(model, train, closed_forms(names, model), wanted, progress)
    for name in names:
        if name in ON_ROWS:
            fitted[name] = _train(name, fitted.get(start), model, train, wanted, seed, progress)
        elif name == JACOBIAN:
            assert prompts is not None
            fitted[name] = jacobian_member(model, prompts, wanted, longest, progress)
    return {name: fitted[name] for name in names}


def _fit_closed(
    model: TransformerBridge, train: Activations, names: Sequence[str], layers: list[int], progress: bool
) -> dict[str, Member]:
    groups: dict[Any, list[str]] = {}
    for name in names:
        method = Method.parse(name)
        groups.setdefault((method.is_identity, method.rows, method.sinks), []).append(name)
    members: dict[str, Member] = {}
    readout = Readout(model) if names else None
    for group in Bar(list(groups.values()), desc="closed forms", disable=not progress):
        with _timed() as shared:
            moments = lens_moments(model, train, group, layers=layers)
        for name in group:
            with _timed() as alone:
                lens = Lens.from_moments(moments, name)
            lens = replace(lens, readout=readout, model=model)  # the rows are known to be of this model
            identity = Method.parse(name).is_identity
            flops = 0 if identity else closed_form_flops(train.n_rows, model.cfg.d_model) * len(layers)
            members[name] = Member(lens, 0.0 if identity else shared.seconds + alone.seconds, flops)
    return members


def _train(
    name: str,
    start: Member | None,
    model: TransformerBridge,
    train: Activations,
    layers: list[int],
    seed: int,
    progress: bool,
) -> Member:
    readout = Readout(model) if start is None else start.lens.on_readout
    with _timed() as clock:
        parts = train_maps(
            name, readout, train, start=None if start is None else start.lens.parts, layers=layers, seed=seed,
            progress=progress,
        )  # fmt: skip
    d, n, vocabulary = readout.d_model, train.n_rows, readout.d_vocab
    pilot = min(PILOT, n)
    steps, batch = steps_for(n, STEPS, BATCH)
    flops: float = {
        "scaled": training_flops(0, d, 1, pilot=pilot, d_vocab=vocabulary),
        "polished": training_flops(
            steps * min(batch, n), d, min(TOKENS, vocabulary), pilot=pilot, d_vocab=vocabulary
        ),
        "tuned": training_flops(round(passes_for(n) * n), d, vocabulary),
    }[name] * len(layers)  # fmt: skip
    seconds = clock.seconds
    if name != "tuned" and start is not None:
        seconds, flops = seconds + start.seconds, flops + start.flops
    return Member(Lens(*parts, readout, model), seconds, flops)


def jacobian_member(
    model: TransformerBridge, prompts: Corpus, layers: list[int], longest: int, progress: bool
) -> Member:
    """A Jacobian lens, with what it took."""
    with _timed() as clock:
        parts = fit_jacobian(
            model, prompts, layers=[layer for layer in layers if layer], longest=longest, progress=progress
        )
    parameters = sum(weight.numel() for weight in model.blocks.parameters() if weight.ndim == 2)
    tokens = int(parts.provenance.details["n_tokens"])
    return Member(
        Lens(*parts).on(model), clock.seconds, jacobian_flops(tokens, int(model.cfg.d_model), parameters)
    )
