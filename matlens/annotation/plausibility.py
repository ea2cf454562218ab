"""Whether what layers predict fits into the sentence: a sheet for a person, and the rates from it (4.2).

Whether a token is plausible depends on the sentence and the token alone. So the sheet asks once for each
such pair, in random order, and does not say which layer or method it comes from.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from matlens import metrics
from matlens.errors import InputError
from matlens.lens.predictions import METHODS
from matlens.models.vocabulary import visible
from matlens.storage.tables import read_table

SHEET_COLUMNS = ("item", "sentence", "token", "plausible")


def make_plausibility_sheet(predictions: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """Every distinct token of every sentence once, shuffled within its sentence, to be marked 1 or 0.

    Parameters
    ----------
    predictions
        Of `tokens.top_predictions`.
    seed
        Of the order.
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


def read_plausibility_sheet(path: str | Path) -> pd.DataFrame:
    """Read a filled sheet.

    Raises
    ------
    InputError
        A column is missing, or a mark is neither 0 nor 1; the message names the first such row.
    """
    sheet = read_table(
        path, SHEET_COLUMNS, what="a sheet of plausible tokens",
        made_by="Expected the sheet as it was written, with 1 or 0 in 'plausible'.",
    )  # fmt: skip
    marks = sheet["plausible"].str.strip()
    wrong = sheet[~marks.isin(["0", "1"])]
    if len(wrong):
        first = wrong.iloc[0]
        raise InputError(
            f"{len(wrong)} of {len(sheet)} rows of {path} are not marked 1 or 0, the first is item "
            f"{first['item']} ({first['token']!r}: {first['plausible']!r}). Fill them in and try again."
        )
    return sheet.assign(plausible=marks.astype(int))


def plausibility_rates(predictions: pd.DataFrame, sheet: pd.DataFrame) -> pd.DataFrame:
    """The paper's rates from the predictions and a filled sheet.

    One row a number, ``method, layer, metric, value, low, high, n``; ``layer`` is empty for all layers
    together. An instance is one sentence at one layer. Metrics are ``tokens``, the share of plausible
    tokens among the top ones; ``instances``, the share of instances with a plausible token; and, of the
    method ``id``, ``more_than_mat``, the share of instances where it has more plausible tokens than
    ``mat``.

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
            f"The sheet has no mark for {token!r} in {prompt!r}, and {int(absent.sum()) - 1} more: it "
            "belongs to other predictions. Expected the sheet that was written beside them."
        )
    whole = predictions.assign(plausible=marks[~marks.index.duplicated()].reindex(keys).to_numpy())
    last = whole["layer"].max()
    both = [whole, whole[(whole["layer"] == last) & (whole["method"] == "id")].assign(method="mat")]
    whole = pd.concat(both[: 1 if "mat" in set(whole[whole["layer"] == last]["method"]) else 2])
    # Sentences that begin alike read the same, and are as many instances.
    whole["again"] = whole.groupby(["method", "layer", "prompt", "rank"]).cumcount()
    counts = whole.groupby(["method", "layer", "prompt", "again"])["plausible"].agg(["sum", "size"])
    rows = []
    for layer in [None, *sorted(whole["layer"].unique())]:
        part = counts if layer is None else counts.xs(layer, level="layer", drop_level=False)
        for method in METHODS:
            own = part.xs(method, level="method")
            tokens = np.repeat([1, 0], [own["sum"].sum(), (own["size"] - own["sum"]).sum()])
            rows.append(_rate(method, layer, "tokens", tokens == 1))
            rows.append(_rate(method, layer, "instances", own["sum"].to_numpy() > 0))
        read, mapped = (part.xs(method, level="method")["sum"] for method in METHODS)
        rows.append(_rate("id", layer, "more_than_mat", (read > mapped.reindex(read.index)).to_numpy()))
    return pd.DataFrame(rows)


def _rate(method: str, layer: int | None, metric: str, hits: np.ndarray) -> dict[str, object]:
    import torch

    estimate = metrics.proportion(torch.from_numpy(np.array(hits)))
    return {"method": method, "layer": layer, "metric": metric, **estimate._asdict()}
