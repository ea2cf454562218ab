"""Tokens that layers predict, side by side, as a person reads them (paper A, Table 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from rich.table import Table

from matlens.activations import Activations
from matlens.errors import InputError
from matlens.maps import MapSet
from matlens.readout import Readout

COLUMNS = ("prompt", "method", "layer", "rank", "token", "probability")
METHODS = ("id", "mat")


def top_predictions(
    readout: Readout, maps: MapSet, prompts: Activations, layers: Sequence[int], *, k: int = 5
) -> pd.DataFrame:
    """The ``k`` most probable tokens at chosen layers under ``id`` and ``mat``, one row a token.

    Columns are ``prompt, method, layer, rank, token, probability``. At the last layer both methods read
    ``h^L`` and there is only ``id``, as in the paper's table.

    Parameters
    ----------
    readout, maps
        Of the model; maps from the layers to the last one.
    prompts
        The stream at each prompt's position, such as `matlens.collect` gives for `make_prompts`.
    layers
        Layers of the stream, negative from the end.
    """
    maps.require_model(prompts.provenance["model"]["fingerprint"])
    last = int(prompts.provenance["model"]["n_layers"])
    for layer in layers:
        if not -last - 1 <= layer <= last:
            raise InputError(f"Layer {layer} is out of range: this model has layers 0 to {last}.")
    rows = []
    for layer in dict.fromkeys(layer % (last + 1) for layer in layers):
        for method in METHODS if layer < last else METHODS[:1]:
            h = prompts[layer] if method == "id" else maps[layer, last](prompts[layer])
            for text, vector in zip(texts(readout, prompts), h, strict=True):
                for rank, (token, probability) in enumerate(readout.top_tokens(vector, k), start=1):
                    rows.append((text, method, layer, rank, token, probability))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def texts(readout: Readout, prompts: Activations) -> list[str]:
    """What the model has read of each prompt: all of it around a mask, up to the position otherwise."""
    examples = prompts.examples
    found = []
    for start, end, position in zip(
        examples.offsets[:-1], examples.offsets[1:], examples.positions, strict=True
    ):
        masked = examples.tokens[start + position] == readout.tokenizer.mask_token_id
        own = examples.tokens[start : end if masked else start + position + 1]
        special = np.isin(own, [i for i in readout.tokenizer.all_special_ids if i != own[position]])
        found.append(readout.tokenizer.decode(own[~special].tolist()).strip())
    return found


def shown(token: str) -> str:
    """Write a token so that its spaces and line breaks can be seen."""
    visible = token.replace("\n", "\\n").replace("\t", "\\t")
    return f"␣{visible[1:]}" if visible.startswith(" ") else visible


def side_by_side(table: pd.DataFrame, prompt: str) -> pd.DataFrame:
    """One prompt's tokens with a column for each method and layer, ``id_4, mat_4, ...``, and a row a rank."""
    own = table[table["prompt"] == prompt]
    columns = {}
    for (layer, method), part in own.groupby(["layer", "method"], sort=True):
        columns[f"{method}_{layer}"] = [shown(token) for token in part.sort_values("rank")["token"]]
    return pd.DataFrame(columns)


def printed(table: pd.DataFrame, prompt: str) -> Table:
    """The same for the terminal."""
    from rich.markup import escape

    wide = side_by_side(table, prompt)
    out = Table(*wide.columns, title=f"Input: {escape(prompt)}", title_justify="left")
    for line in wide.itertuples(index=False):
        out.add_row(*(escape(token) for token in line))
    return out
