"""The whole report of one model on one corpus: lenses fitted, judged, and left early by, in one call."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import torch

from matlens.activations.activations import Activations, Positions
from matlens.activations.collecting import collect
from matlens.activations.sinks import SinkWarning, sink_rows
from matlens.data.corpus import Corpus
from matlens.data.corpus_examples import make_examples
from matlens.data.readers import is_masked
from matlens.errors import Between, InputError, PositiveInt, Seed, checked, short, warn
from matlens.lens.cosines import cosine_table
from matlens.lens.evaluations import EvaluationItem, evaluate_lenses
from matlens.lens.exits import lens_exit_sweep
from matlens.lens.jacobian import LONGEST, PROMPTS, longest_sentences
from matlens.lens.lens import Lens
from matlens.lens.maps import LayerMap
from matlens.lens.members import default_methods, fit_members, jacobian_member
from matlens.lens.report import Member, report_table
from matlens.lens.trained import check_method_names, sites_of_rows
from matlens.linear.fitting import fit_samples
from matlens.models.sites import Site

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@dataclass(frozen=True)
class Comparison:
    """Tables of a report, and the lenses that it is about.

    Attributes
    ----------
    report
        See `report_table`.
    exits
        See `lens_exit_sweep`.
    cosines
        See `cosine_table`; ``None`` without Jacobians.
    evaluations
        See `evaluate_lenses`; ``None`` where none were given.
    members
        The lenses and what each took.
    origin
        What the numbers come from.
    """

    report: pd.DataFrame
    exits: pd.DataFrame
    cosines: pd.DataFrame | None
    evaluations: pd.DataFrame | None
    members: Mapping[str, Member]
    origin: Mapping[str, Any] = field(repr=False)


@checked
def default_layers(n_layers: PositiveInt) -> list[int]:
    """A sixth, a third, a half, two thirds and five sixths of the way."""
    return sorted({max(1, round(n_layers * share / 6)) for share in (1, 2, 3, 4, 5)} - {n_layers}) or [0]


@checked
def compare_lenses(
    model: TransformerBridge,
    parts: tuple[Corpus, Corpus],
    folder: str | Path,
    *,
    methods: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    against: str | None = None,
    n_prompts: Annotated[int, Between(2)] = PROMPTS,
    longest: PositiveInt = LONGEST,
    evaluations: Mapping[str, Sequence[EvaluationItem]] | None = None,
    seed: Seed = 0,
    progress: bool = True,
) -> Comparison:
    """Fit lenses on one part of a corpus, and judge all on the same tokens of the other.

    Lenses are fitted at every token of the training sentences, or at their masks, and judged at one drawn
    token of each validation sentence, so that tokens are independent.

    Parameters
    ----------
    model
        The model.
    parts
        The training and the validation sentences, as `Corpus.split` gives them.
    folder
        Where vectors are written, which can be removed afterwards; a killed run goes on there.
    methods
        See `fit_members`; by default `default_methods` of the model.
    layers
        The layers, by default those of `default_layers`.
    against
        The member from which paired differences are taken; by default ``mat`` where it is there.
    n_prompts, longest
        Training sentences that Jacobians are taken on, the longest, and the tokens that they are cut to.
        Half of them fit one lens and half the other, and the mean of both is the member.
    evaluations
        Open sets to read besides, see `read_evaluations`; for decoders.
    seed
        Of the positions, and of the rows and tokens that training draws.
    progress
        Whether to show bars.

    Raises
    ------
    InputError
        A method or a layer is none, or the corpus is too small.
    """
    names = default_methods(model) if methods is None else check_method_names(methods)
    if len(parts) != 2:
        raise InputError(
            f"{len(parts)} parts of a corpus are given. Expected two, as Corpus.split gives them."
        )
    train_texts, validation_texts = (frozenset(part.sentences) for part in parts)
    if both := len(train_texts & validation_texts):
        warn(
            f"{both:,} of {len(validation_texts):,} validation sentences are also among the training "
            "sentences, so lenses look better than they are on new text. Use Corpus.split."
        )
    if against is not None and against not in names:
        raise InputError(f"There is no member {short(against)}. Expected one of {short(names)}.")
    masked, last = is_masked(model), int(model.cfg.n_layers)
    if masked and "jacobian" in names:
        raise InputError("A masked-LM model has no Jacobian lens. Expected methods without 'jacobian'.")
    wanted = default_layers(last)
    if layers is not None:
        wanted = sorted({Site.parse(layer, last).layer for layer in layers})
    sites = sites_of_rows(names, wanted, last)
    place: Positions = "drawn" if masked else "all"
    train = collect(
        model, make_examples(model, parts[0], seed=seed), sites, positions=place,
        folder=Path(folder) / f"lens-rows-{'all' if len(sites) > last else '-'.join(map(str, wanted))}",
        progress=progress,
    )  # fmt: skip
    validation = collect(
        model, make_examples(model, parts[1], seed=seed), folder=Path(folder) / "lens-validation",
        progress=progress,
    )  # fmt: skip
    others = [name for name in names if name != "jacobian"]
    members = fit_members(model, train, others, layers=wanted, seed=seed, progress=progress) if others else {}
    cosines = None
    if "jacobian" in names:
        *halves, members["jacobian"] = _jacobians(model, parts[0], wanted, n_prompts, longest, progress)
        cosines = _cosines(members, (halves[0].lens, halves[1].lens), train)
    members = {name: members[name] for name in names}
    judged_at = [layer for layer in wanted if layer or "jacobian" not in names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SinkWarning)
        sinks = sink_rows(validation)
    table = report_table(
        members, validation, layers=judged_at, sinks=sinks, progress=progress,
        against=against if against is not None else "mat" if "mat" in names else None,
    )  # fmt: skip
    lenses = {name: member.lens for name, member in members.items()}
    exits = lens_exit_sweep(lenses, validation, layers=judged_at, progress=progress)
    read = None
    if evaluations is not None:
        read = evaluate_lenses(lenses, evaluations, layers=judged_at, progress=progress)
    origin = {
        **_origin(train, validation, lenses),
        "layers": wanted, "methods": names, "seed": seed, "n_sinks": int(sinks.sum()),
    }  # fmt: skip
    return Comparison(table, exits, cosines, read, members, origin)


def _origin(train: Activations, validation: Activations, lenses: Mapping[str, Lens]) -> dict[str, Any]:
    """What the numbers come from, as far as the data and the lenses say."""
    details = {name: lens.provenance.details for name, lens in lenses.items()}
    origin = {
        **validation.provenance.to_json("model", "data"),
        "train": train.provenance.to_json("data", "positions"),
        "n_rows": train.n_rows,
        "strengths": {name: held["strengths"] for name, held in details.items() if "strengths" in held},
    }
    if "jacobian" in details:
        jacobian = details["jacobian"]
        origin |= {"n_prompts": jacobian["n_fitted"], "n_prompt_tokens": jacobian["n_tokens"]}
    return origin


def _cosines(
    members: Mapping[str, Member], halves: tuple[Lens, Lens], train: Activations
) -> pd.DataFrame | None:
    """Cosines of the Jacobian lens and those in closed form; ``None`` where there is none of these."""
    plain: dict[str, Lens] = {name: members[name].lens for name in ("mat", "affine") if name in members}
    if not plain:
        return None
    of_halves = {name: _halves(lens, train, intercept=name == "affine") for name, lens in plain.items()}
    lenses = {**plain, "jacobian": members["jacobian"].lens}
    return cosine_table(lenses, {**of_halves, "jacobian": halves})


def _halves(lens: Lens, train: Activations, *, intercept: bool) -> tuple[Lens, Lens]:
    """Least squares on the first half of the rows, and on the second."""
    first = torch.arange(train.n_rows) < train.n_rows // 2
    pairs = [(layer, lens.n_layers) for layer in lens.layers]

    def of(rows: torch.Tensor) -> Lens:
        fitted = fit_samples(train, pairs, rows=rows, intercept=intercept)
        maps = {layer: LayerMap(linear.weight) for layer, linear in zip(lens.layers, fitted, strict=True)}
        return replace(lens, maps=maps)

    return of(first), of(~first)


def _jacobians(
    model: TransformerBridge, corpus: Corpus, layers: list[int], n: int, longest: int, progress: bool
) -> tuple[Member, Member, Member]:
    """Lenses of two halves of the prompts, and their mean, which has taken the time of both."""
    longest_first = longest_sentences(corpus, n - n % 2)
    if len(longest_first) < 2:
        raise InputError("Jacobians are taken on two halves of the prompts. Expected two sentences or more.")
    halves = [
        jacobian_member(
            model, Corpus(corpus.name, tuple(longest_first[i::2]), n, 0, 0, 0), layers, longest, progress
        )
        for i in (0, 1)
    ]
    return halves[0], halves[1], mean_member(*halves)


def mean_member(first: Member, second: Member) -> Member:
    """The mean of two lenses' matrices, with the costs of both."""
    a, b = first.lens, second.lens
    width = a.provenance.identity.d_model
    counts = [lens.provenance.details["n_fitted"] for lens in (a, b)]
    share = counts[0] / sum(counts)
    maps = {
        layer: LayerMap(share * a.maps[layer].matrix(width) + (1 - share) * b.maps[layer].matrix(width))
        for layer in a.layers
    }
    details = {
        "n_fitted": sum(counts),
        "n_tokens": sum(lens.provenance.details["n_tokens"] for lens in (a, b)),
    }
    lens: Lens = replace(a, maps=maps, provenance=a.provenance.with_details(**details))
    return Member(lens, first.seconds + second.seconds, first.flops + second.flops)
