"""Tokens that layers predict, side by side, as a person reads them (paper A, Table 1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from rich.table import Table
from rich.text import Text
from torch import Tensor

from matlens import metrics
from matlens.activations.activations import Activations
from matlens.activations.collecting import collect
from matlens.data.corpus import Corpus, as_corpus
from matlens.data.making import make_examples
from matlens.data.readers import is_masked
from matlens.errors import InputError, PositiveInt, Seed, checked, printable, short
from matlens.io.tables import check_columns, read_table
from matlens.linear.mapsets import MapSet
from matlens.models.readout import Readout
from matlens.models.tokens import encode_text, visible
from matlens.numerics import log_softmax

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

    from matlens.data.examples import Examples

COLUMNS = {
    "prompt": "str", "method": "str", "layer": "int64", "rank": "int64", "token": "str",
    "probability": "float64",
}  # fmt: skip
METHODS = ("id", "mat")
_ROWS = 256  # rows that are read out at once


@checked
def top_predictions(
    readout: Readout, maps: MapSet, prompts: Activations, layers: Sequence[int], *, k: PositiveInt = 5
) -> pd.DataFrame:
    """The ``k`` most probable tokens at chosen layers under ``id`` and ``mat``, one row a token.

    Columns are ``prompt, method, layer, rank, token, probability``. At the last layer both methods read
    ``h^L`` and there is only ``id``, as in the paper's table.

    Parameters
    ----------
    readout, maps
        The read-out of the model, and maps from the layers to the last one.
    prompts
        The stream at each prompt's position, such as `matlens.collect` gives for `make_prompts`.
    layers
        Layers of the stream; negative ones count from the end.
    k
        The number of tokens.

    Raises
    ------
    InputError
        A layer is out of range or has no map to the last one, there is no layer, ``k`` is less than 1 or more
        than the vocabulary has, or the maps are of another model.
    """
    maps.provenance.check_same(prompts.provenance, ours="the maps", theirs="the activations")
    readout.check_same(prompts.provenance)
    last = prompts.provenance.identity.n_layers
    if not layers:
        raise InputError("layers must not be empty.")
    rows = []
    for layer in dict.fromkeys(prompts.resolve(layer).layer for layer in layers):
        for method in METHODS if layer < last else METHODS[:1]:
            h = prompts[layer] if method == "id" else maps[layer, last](prompts[layer])
            for text, vector in zip(prompt_texts(readout, prompts), h, strict=True):
                for rank, (token, probability) in enumerate(readout.top_tokens(vector, k), start=1):
                    rows.append((text, method, layer, rank, token, probability))
    return pd.DataFrame(rows, columns=list(COLUMNS))


@checked
def read_predictions(path: str | Path) -> pd.DataFrame:
    """Read back a table of `top_predictions`, tokens such as ``"nan"`` and a line break included.

    Raises
    ------
    InputError
        There is no such table.
    """
    return read_table(
        path, COLUMNS, what="a table of predictions", made_by="The analysis 'plausibility' writes it.",
        lineterminator="\n",
    )  # fmt: skip


@checked
def prompt_texts(readout: Readout, prompts: Activations) -> list[str]:
    """The part of each prompt that the model has read: all of it around a mask, or up to the position."""
    readout.check_same(prompts.provenance, theirs="the prompts")
    examples, tokenizer = prompts.examples, readout.tokenizer
    # A word that the tokenizer does not know is part of the sentence all the same. (By name: a special
    # token that a tokenizer lacks has the number of the unknown word.)
    names = {*tokenizer.all_special_tokens} & {*tokenizer.get_vocab()}
    if tokenizer.unk_token not in (tokenizer.bos_token, tokenizer.eos_token):
        names.discard(tokenizer.unk_token)
    added = {*tokenizer.convert_tokens_to_ids(sorted(names))}
    texts = []
    starts, ends = examples.offsets[examples.sentences], examples.offsets[examples.sentences + 1]
    for start, end, position in zip(starts, ends, examples.positions, strict=True):
        masked = examples.tokens[start + position] == readout.tokenizer.mask_token_id
        tokens = examples.tokens[start : end if masked else start + position + 1]
        special = np.isin(tokens, sorted(added - {tokens[position]}))
        texts.append(readout.tokenizer.decode(tokens[~special].tolist()).strip())
    return texts


@checked
def side_by_side(table: pd.DataFrame, prompt: str) -> pd.DataFrame:
    """One prompt's tokens: a column for each method and layer (``id_4, mat_4, ...``), a row for each rank.

    Raises
    ------
    InputError
        It is no table of predictions, or has none for the prompt.
    """
    check_columns(table, COLUMNS, what="the table of top_predictions")
    predictions = table[table["prompt"] == prompt]
    if predictions.empty:
        raise InputError(f"The table has no predictions for the prompt {short(prompt)}.")
    columns = {}
    for (layer, method), part in predictions.groupby(["layer", "method"], sort=True):
        columns[f"{method}_{layer}"] = [visible(token) for token in part.sort_values("rank")["token"]]
    return pd.DataFrame(columns)


@checked
def predictions_table(table: pd.DataFrame, prompt: str) -> Table:
    """The table of `side_by_side`, for the terminal."""
    wide = side_by_side(table, prompt)
    out = Table(*wide.columns, title=Text(f"Input: {printable(prompt)}"), title_justify="left")
    for tokens in wide.itertuples(index=False):
        out.add_row(*(Text(token) for token in tokens))
    return out


@checked
@torch.inference_mode()
def prediction_confidence(
    model: TransformerBridge, examples: Examples, *, progress: bool = True
) -> Float[Tensor, " n"]:
    """The probability that the model gives to its prediction for each example.

    Parameters
    ----------
    model, examples
        The model to run, and the examples that it is run on, one position each.
    progress
        Whether to show a bar over the examples.
    """
    last = collect(model, examples, ["h.-1"], progress=progress)[-1]
    readout = Readout(model)
    return torch.cat([log_softmax(readout.logits(rows)).amax(-1).exp().cpu() for rows in last.split(_ROWS)])


@checked
def masked_accuracy(
    model: TransformerBridge, corpus: Corpus | Sequence[str], *, seed: Seed = 0, progress: bool = True
) -> metrics.Estimate:
    """How often a masked-LM model fills in the token that the sentence has there; one is masked in each.

    Parameters
    ----------
    model
        The model.
    corpus
        Sentences that it was not trained on. Tokens that the tokenizer adds are not masked.
    seed
        Seed of the positions.
    progress
        Whether to show a progress bar.

    Raises
    ------
    InputError
        The model predicts the next token and not a masked one.
    """
    if not is_masked(model):
        raise InputError(
            f"{model.cfg.model_name} is a decoder and fills in no masks. Expected a masked-LM model."
        )
    corpus = as_corpus(corpus)
    examples = make_examples(model, corpus, seed=seed, draw_special=False)
    there = [
        encode_text(model, text).ids[position]
        for text, position in zip(corpus.sentences, examples.positions.tolist(), strict=True)
    ]
    last = collect(model, examples, [-1], progress=progress)[-1]
    readout = Readout(model)
    best = torch.cat([readout.logits(part).argmax(-1).cpu() for part in last.split(_ROWS)])
    return metrics.proportion(best == torch.tensor(there))
