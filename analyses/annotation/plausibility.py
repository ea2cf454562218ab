"""Whether what layers predict fits into the sentence: a sheet for a person, and the rates from it (4.2).

Whether a token is plausible depends on the sentence and the token alone. So the sheet asks once for each
such pair, in random order, and does not say which layer or method it comes from.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from paper_a.predictions import METHODS

from annotation.sheets import read_sheet, refuse_lines
from matlens import metrics
from matlens.errors import InputError, Seed, checked, short
from matlens.models.tokens import visible

SHEET_COLUMNS = ("item", "sentence", "token", "plausible")


@checked
def make_plausibility_sheet(predictions: pd.DataFrame, *, seed: Seed = 0) -> pd.DataFrame:
    """Every distinct token of every sentence once, shuffled within its sentence, to be marked 1 or 0.

    Parameters
    ----------
    predictions
        The table of `top_predictions`.
    seed
        Seed of the order.
    """
    pairs = predictions[["prompt", "token"]].drop_duplicates()
    shuffled = pairs.sample(frac=1, random_state=seed)
    # One sentence after the other, in their first order, so that each is read once.
    order = {prompt: i for i, prompt in enumerate(predictions["prompt"].unique())}
    shuffled = shuffled.sort_values("prompt", key=lambda column: column.map(order), kind="stable")
    return pd.DataFrame(
        {
            "item": np.arange(1, len(shuffled) + 1),
            "sentence": shuffled["prompt"].to_list(),
            "token": [visible(token) for token in shuffled["token"]],
            "plausible": "",
        }
    )


@checked
def read_plausibility_sheet(path: str | Path) -> pd.DataFrame:
    """Read a filled sheet.

    Raises
    ------
    InputError
        A column is missing, or a mark is neither 0 nor 1; the message names the first such line.
    """
    sheet = read_sheet(path, SHEET_COLUMNS, unchanged=("sentence", "token"))
    if sheet.empty:
        raise InputError(f"{path} has no lines. Expected the sheet as it was written, filled in.")
    marked = sheet["plausible"].isin(["0", "1"])
    refuse_lines(path, sheet, ~marked, "plausible", "1 or 0 for every token")
    refuse_lines(path, sheet, sheet.duplicated("item"), "item", "each line of the sheet once")
    unlike = sheet.groupby(["sentence", "token"])["plausible"].transform("nunique") > 1
    refuse_lines(
        path, sheet, unlike, "plausible", "one mark for a token of a sentence, not 1 here and 0 there"
    )
    return sheet.assign(plausible=sheet["plausible"].astype(int)).reset_index(drop=True)


@checked
def plausibility_rates(predictions: pd.DataFrame, sheet: pd.DataFrame) -> pd.DataFrame:
    """The paper's rates from the predictions and a filled sheet.

    One row a number, ``method, layer, metric, value, low, high, n``; ``layer`` is empty for all layers
    together. An instance is one sentence at one layer. Metrics are ``tokens``, the share of plausible
    tokens among the top ones; ``instances``, the share of instances with a plausible token; and, of the
    method ``id``, ``more_than_mat``, the share of instances where it has more plausible tokens than
    ``mat``.

    Parameters
    ----------
    predictions
        The table of `top_predictions` that the sheet was made of.
    sheet
        The filled sheet, as `read_plausibility_sheet` gives it.

    Raises
    ------
    InputError
        The sheet lacks a token of the predictions: it belongs to others.
    """
    marks = sheet.set_index(["sentence", "token"])["plausible"]
    keys = pd.MultiIndex.from_arrays([predictions["prompt"], predictions["token"].map(visible)])
    absent = ~keys.isin(marks.index)
    if absent.any():
        prompt, token = keys[absent][0]
        raise InputError(
            f"The sheet has no mark for {short(token)} in {short(prompt)}, and {int(absent.sum()) - 1} more: "
            "it belongs to other predictions. Expected the sheet that was written next to them."
        )
    marked = predictions.assign(plausible=marks[~marks.index.duplicated()].reindex(keys).to_numpy())
    last = marked[marked["layer"] == marked["layer"].max()]
    if "mat" not in set(last["method"]):  # the last layer is read in one way, which is both methods'
        marked = pd.concat([marked, last[last["method"] == "id"].assign(method="mat")])
    # Sentences that begin alike read the same, and are as many instances.
    marked["repeat"] = marked.groupby(["method", "layer", "prompt", "rank"]).cumcount()
    instances = marked.groupby(["method", "layer", "prompt", "repeat"])["plausible"].agg(["sum", "size"])
    rows = []
    for layer in [None, *sorted(marked["layer"].unique())]:
        part = instances if layer is None else instances.xs(layer, level="layer", drop_level=False)
        counts = {method: part.xs(method, level="method") for method in METHODS}
        for method, count in counts.items():
            accepted, judged = int(count["sum"].sum()), int(count["size"].sum())
            tokens = np.repeat([1, 0], [accepted, judged - accepted])
            rows.append(_rate(method, layer, "tokens", tokens == 1))
            rows.append(_rate(method, layer, "instances", count["sum"].to_numpy() > 0))
        read, mapped = (counts[method]["sum"] for method in ("id", "mat"))
        rows.append(_rate("id", layer, "more_than_mat", (read > mapped.reindex(read.index)).to_numpy()))
    return pd.DataFrame(rows)


def _rate(method: str, layer: int | None, metric: str, hits: np.ndarray) -> dict[str, object]:
    estimate = metrics.proportion(torch.from_numpy(np.array(hits)))
    return {"method": method, "layer": layer, "metric": metric, **estimate._asdict()}
