"""Quality of each layer's predictions, and top tokens side by side (paper A, Figure 4 and Table 1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from studies import Model, Report, Study
from torch import Tensor

from matlens import MapSet, Readout, collect, make_examples, metrics, plots
from matlens.activations import Activations
from matlens.data import Corpus, Examples
from matlens.io import read_table
from matlens.lens import prediction_quality
from matlens.models import visible
from matlens.numerics import log_softmax

COLUMNS = {
    "prompt": "str", "method": "str", "layer": "int64", "rank": "int64", "token": "str",
    "probability": "float64",
}  # fmt: skip
METHODS = ("id", "mat")
_ROWS = 256  # vectors per readout


def write_quality(study: Study, report: Report, name: str) -> None:
    """Fit the maps, write prediction quality as a table and draw it over the layers."""
    table = prediction_quality(study.readout, study.maps, study.validation)
    report.write(name, table, study.origin, plots.plot_layers(table))


def top_predictions(
    readout: Readout, maps: MapSet, prompts: Activations, layers: Sequence[int], *, k: int = 5
) -> pd.DataFrame:
    """The ``k`` most probable tokens at chosen layers under ``id`` and ``mat``, one row per token.

    Columns are ``prompt, method, layer, rank, token, probability``. At the last layer both methods read
    ``h^L`` and there is only ``id``, as in the paper's table.
    """
    maps.provenance.check_same(prompts.provenance, ours="the maps", theirs="the activations")
    readout.check_same(prompts.provenance)
    last = prompts.provenance.identity.n_layers
    rows = []
    for layer in dict.fromkeys(prompts.resolve(layer).layer for layer in layers):
        for method in METHODS if layer < last else METHODS[:1]:
            h = prompts[layer] if method == "id" else maps[layer, last](prompts[layer])
            for text, vector in zip(prompt_texts(readout, prompts), h, strict=True):
                for rank, (token, probability) in enumerate(readout.top_tokens(vector, k), start=1):
                    rows.append((text, method, layer, rank, token, probability))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def read_predictions(path: str | Path) -> pd.DataFrame:
    """Read a table of `top_predictions`; the token ``nan`` is read as text."""
    return read_table(
        path, COLUMNS, what="a table of predictions", made_by="The analysis 'plausibility' writes it.",
    )  # fmt: skip


def prompt_texts(readout: Readout, prompts: Activations) -> list[str]:
    """The text that the model has read at each position."""
    examples, tokenizer = prompts.examples, readout.tokenizer
    # Unknown words are part of the sentence. (By name: a special token that a tokenizer lacks has the id of
    # the unknown token.)
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


def predictions_side_by_side(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By prompt, one column per method and layer (``id_4, mat_4, ...``), one row per rank."""
    table = table.assign(token=table["token"].map(visible))
    wide = {
        str(prompt): part.pivot(index="rank", columns=["layer", "method"], values="token").sort_index(axis=1)
        for prompt, part in table.groupby("prompt", sort=False)
    }
    for tokens in wide.values():
        tokens.columns = [f"{method}_{layer}" for layer, method in map(tuple, tokens.columns)]
    return wide


@torch.inference_mode()
def prediction_confidence(model: Model, examples: Examples) -> Float[Tensor, " n"]:
    """The probability of the model's top token for each example."""
    last = collect(model, examples, ["h.-1"])[-1]
    readout = Readout(model)
    return torch.cat([log_softmax(readout.logits(rows)).amax(-1).exp().cpu() for rows in last.split(_ROWS)])


def masked_accuracy(model: Model, corpus: Corpus, *, seed: int = 0) -> metrics.Estimate:
    """Accuracy of a masked-LM model on one masked token per sentence."""
    examples = make_examples(model, corpus, seed=seed, sample_special=False)
    truth = [
        model.tokenizer(text)["input_ids"][position]
        for text, position in zip(corpus.sentences, examples.positions.tolist(), strict=True)
    ]
    last = collect(model, examples, [-1])[-1]
    readout = Readout(model)
    best = torch.cat([readout.logits(part).argmax(-1).cpu() for part in last.split(_ROWS)])
    return metrics.proportion(best == torch.tensor(truth))
