"""How many sentences a study takes, and whether its samples are enough for maps of a model's width."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from matlens.linear.samples import are_few

if TYPE_CHECKING:
    import pandas as pd

_PLENTY = 10  # samples per dimension from which a map worse than `id` is not for want of samples
Part = Literal["train", "validation"]


def fitting_sizes(
    n: int, n_train: int, n_validation: int, adjustable: Collection[Part] = ("train", "validation")
) -> tuple[int, int]:
    """Sizes of the two parts that a corpus is split into, made smaller where it has too few sentences.

    Parameters
    ----------
    n
        Sentences of the corpus.
    n_train, n_validation
        The sizes that are wanted.
    adjustable
        Which sizes can be made smaller: both in proportion, or one to what the other leaves.

    Returns
    -------
    tuple of int
        Sizes that fit; those that were wanted where nothing can be done.
    """
    smaller = n_train, n_validation
    if n_train + n_validation > n:
        if {"train", "validation"} <= set(adjustable):
            share = n / (n_train + n_validation)
            smaller = int(n_train * share), int(n_validation * share)
        elif "train" in adjustable:
            smaller = n - n_validation, n_validation
        elif "validation" in adjustable:
            smaller = n_train, n - n_train
    return smaller if smaller[0] >= 1 and smaller[1] >= 2 else (n_train, n_validation)


def note_on_samples(fit: Mapping[str, Any], results: pd.DataFrame | None = None) -> str | None:
    """What a table of results says of the samples that its maps were fitted on; ``None`` if they suffice.

    Samples without a ridge are too few if there are fewer than twice as many as dimensions, or if there are
    fewer than ten times as many and r2 of a map is below that of ``id``, which fits nothing.

    Parameters
    ----------
    fit
        The provenance of the maps, as JSON.
    results
        What the maps are worth on other samples, as `matlens.lens.fit_quality` gives it.
    """
    model = fit.get("model") or {}
    n, width, ridge = fit.get("n_samples"), model.get("d_model"), fit.get("ridge", 0)
    if n is None or width is None:
        return None
    few = f"The maps were fitted on {n:,} samples, which is few for {width:,} dimensions"
    if ridge:
        return f"{few}: a ridge of {ridge:g} limits their noise." if are_few(n, width) else None
    remedy = "Use more sentences (--train), all positions (--positions all) or a penalty (--ridge)."
    if results is not None and n < _PLENTY * width:
        r2 = results[results["metric"] == "r2"].pivot_table("value", ["layer", "target"], "method")
        worse = int((r2["mat"] < r2["id"]).sum()) if {"mat", "id"} <= {*r2} else 0
        if worse:
            return f"{few}: r2 of mat is below that of id for {worse} of {len(r2)} pairs of layers. {remedy}"
    return f"{few}: most of their error on other sentences is noise. {remedy}" if are_few(n, width) else None
