"""The report: lenses of one model judged on the same tokens, with what each cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from jaxtyping import Bool
from torch import Tensor

from matlens.activations.activations import Activations
from matlens.errors import InputError, check_number, checked, short
from matlens.io.tables import check_columns, result_row, result_table
from matlens.lens.judgement import judge_scores
from matlens.lens.lens import Lens
from matlens.lens.measures import lens_r2, lens_scores
from matlens.lens.quality import validation_row
from matlens.linear.samples import warn_of_same_sentences
from matlens.metrics import Estimate

REPORT = "lens_report"
AGAINST = "against"
"""The column that names the member from which a row is the difference; empty where a row is none."""
COSTS = ("seconds", "flops", "numbers", "bytes")


@checked
@dataclass(frozen=True, eq=False)
class Member:
    """A lens and what it took to fit it.

    Attributes
    ----------
    lens
        The lens, on its model.
    seconds
        Seconds of one processor that its fit took, all layers together, without collecting the rows.
    flops
        Floating-point operations of that, counted from the sizes.
    """

    lens: Lens
    seconds: float = 0.0
    flops: float = 0.0

    def __post_init__(self) -> None:
        check_number(self.seconds, "The seconds of a member", min=0)
        check_number(self.flops, "The operations of a member", min=0)
        _ = self.lens.on_readout


@checked
def report_table(
    members: Mapping[str, Member],
    validation: Activations,
    *,
    layers: Sequence[int] | None = None,
    against: str | None = None,
    sinks: Bool[Tensor, " n"] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Judge lenses on the same validation tokens, and set what each cost beside it.

    Parameters
    ----------
    members
        Lenses of one model, by what they are called.
    validation
        Vectors of the layers and of the last one, at tokens that no lens was fitted on.
    layers
        Layers to judge at, by default all that every lens has and that were collected.
    against
        The member from which paired differences are taken; by default there are none.
    sinks
        True for the tokens that are attention sinks; r2 is then given without them too.
    progress
        Whether to show a bar.

    Returns
    -------
    pandas.DataFrame
        A tidy table with one more column, ``against``. Metrics are ``precision`` for ``k`` of 1, 5 and 10,
        ``surprisal``, ``kl``, ``r2`` and ``r2 without sinks``, these two only of lenses that do not
        standardize vectors, since r2 of those is not comparable; and, with no layer, ``seconds``, ``flops``,
        ``numbers`` and ``bytes`` for one layer in the mean. Where ``against`` names a member, a value is the
        difference from it, and its interval that of paired differences.

    Raises
    ------
    InputError
        There is no member, one is of another model, a layer is not there, or there is no such member to
        compare with.
    """
    if not members:
        raise InputError("There is nothing to report on. Expected a lens or more.")
    if against is not None and against not in members:
        raise InputError(f"There is no member {short(against)}. Expected one of {short(list(members))}.")
    lenses = {name: member.lens for name, member in members.items()}
    for lens in lenses.values():
        lens.provenance.check_same(validation.provenance, ours="the lens", theirs="the activations")
    fitted = [lens.provenance for lens in lenses.values() if lens.n_samples]
    if fitted:
        warn_of_same_sentences(fitted[0], validation.provenance, "The lenses", parts=False)
    last = validation.provenance.identity.n_layers
    wanted = shared_layers(lenses, validation, layers)
    if sinks is not None and (sinks.shape != (validation.n_rows,) or int((~sinks).sum()) < 2):
        raise InputError(
            f"sinks is {short(sinks)}. Expected True or False for each of the {validation.n_rows} tokens, "
            "and False for two or more."
        )
    readout, truth = next(iter(lenses.values())).on_readout, validation[last]
    rows: list[dict[str, Any]] = []
    for layer in wanted:
        h = validation[layer]
        scores = {name: lens_scores(lens, h, layer) for name, lens in lenses.items()}
        judged = judge_scores(readout, truth, scores, progress=progress)
        for name, lens in lenses.items():

            def add(metric: str, k: int | None, value: Estimate, other: str = "", name: str = name) -> None:
                row = validation_row(REPORT, validation, name, layer, last, metric, k, value)  # noqa: B023
                rows.append(row | {AGAINST: other})

            for (metric, k), estimate in judged[name].estimates().items():
                add(metric, k, estimate)
            if against is not None and name != against:
                for (metric, k), estimate in judged[name].differences(judged[against]).items():
                    add(metric, k, estimate, against)
            if lens.norm is not None:  # r2 of standardized vectors is of another variance
                continue
            add("r2", None, lens_r2(lens, h, truth, layer))
            if sinks is not None:
                add("r2 without sinks", None, lens_r2(lens, h, truth, layer, rows=~sinks))
    for name, member in members.items():
        n = len(member.lens.layers)
        kept = member.lens.n_numbers / n
        values = dict(zip(COSTS, (member.seconds / n, member.flops / n, kept, 4 * kept), strict=True))
        for metric, value in values.items():
            rows.append(
                result_row(
                    REPORT, model=validation.provenance.identity.name, corpus=validation.provenance.corpus,
                    method=name, layer=None, target=last, metric=metric,
                    estimate=Estimate(value, float("nan"), float("nan"), n), against="",
                )
            )  # fmt: skip
    return result_table(rows, AGAINST)


def shared_layers(
    lenses: Mapping[str, Lens], validation: Activations, layers: Sequence[int] | None
) -> list[int]:
    """The layers that are asked for, or all that every lens has and that were collected."""
    last = validation.provenance.identity.n_layers
    for name, lens in lenses.items():
        absent = [layer for layer in layers or () if lens.resolve(layer) not in lens.layers]
        if absent:
            raise InputError(
                f"The lens {short(name)} has no map of layer {absent[0]}. Expected one that it has."
            )
    shared = set.intersection(*(set(lens.layers) for lens in lenses.values()))
    first = next(iter(lenses.values()))
    wanted = sorted(shared if layers is None else {first.resolve(layer) for layer in layers})
    collected = [layer for layer in wanted if f"h.{layer}" in validation]
    if f"h.{last}" not in validation or not collected or (layers is not None and collected != wanted):
        raise InputError(
            f"The activations do not hold layer {last} and the layers {short(wanted)}. Collect these too."
        )
    return collected


@checked
def report_by_member(table: pd.DataFrame) -> pd.DataFrame:
    """A table for people: a row for each member, measures in the mean over layers, and its costs.

    Raises
    ------
    InputError
        It is no table of `report_table`.
    """
    columns = ["method", "layer", "metric", "k", "value", AGAINST]
    check_columns(table, columns, what="the table of lens.report_table")
    plain = table[table[AGAINST].fillna("") == ""]
    named = plain.assign(
        measure=[
            metric if pd.isna(k) else f"P@{int(k)}"
            for metric, k in zip(plain["metric"], plain["k"], strict=True)
        ]
    )
    wide = named.pivot_table(index="method", columns="measure", values="value", aggfunc="mean", sort=False)
    order = ["P@1", "P@5", "P@10", "surprisal", "kl", "r2", "r2 without sinks", *COSTS]
    return wide[[name for name in order if name in wide]]
