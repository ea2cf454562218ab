"""How many sentences a study takes, and whether its samples are enough for maps of a model's width."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from matlens.linear.samples import few_samples_note

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


def note_on_samples(fit: Mapping[str, Any]) -> str | None:
    """What a reader of numbers must know of the samples that maps were fitted on; None where they are many.

    Parameters
    ----------
    fit
        The provenance of the maps, as JSON.
    """
    model = fit.get("model") or {}
    n_samples, d_model, ridge = fit.get("n_samples"), model.get("d_model"), fit.get("ridge", 0)
    if n_samples is None or d_model is None:
        return None
    note = few_samples_note(n_samples, d_model, ridge=ridge)
    if note is None or ridge:
        return note
    return (
        f"{note} More sentences (--train), all positions (--positions all) or a penalty (--ridge) give "
        "better maps."
    )
