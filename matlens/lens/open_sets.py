"""Open sets: words that a layer may predict on the way to the model's answer.

They are the six files of ``data/evaluations`` of *anthropics/jacobian-lens* (Apache-2.0), read from a folder
that the user names, in their protocol. An item has a prompt and intermediate words, such as "Netherlands" for
"The capital of the country famous for tulips is". A prompt is read at its last token, without white space at
the end; for poetry, at the end of its last complete line. A word's rank is the best over its single-token
spellings and over layers. pass@k is the mean over items of the share of their words with a rank of at most k;
words without a single token are not scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from matlens import metrics
from matlens.activations.activations import Activations
from matlens.activations.collecting import collect
from matlens.data.making import make_prompts
from matlens.errors import InputError, checked, short
from matlens.io.files import read_json
from matlens.io.tables import result_row, result_table
from matlens.lens.evaluation import KS
from matlens.lens.lens import Lens
from matlens.metrics import Estimate
from matlens.models.tokens import check_tokenizer, word_token
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

EVALUATIONS = ("multihop", "multilingual", "order-ops", "association", "poetry", "typo")
_NUMBERS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip
_OPERATIONS = {
    "addition": ("+", "plus", "add", "sum"),
    "subtraction": ("-", "minus", "subtract"),
    "multiplication": ("*", "times", "multiply", "product"),
    "division": ("/", "divided", "divide"),
    "mod": ("%", "modulo"),
    "squared": ("^", "**", "square"),
}


@checked
@dataclass(frozen=True)
class EvaluationItem:
    """A prompt up to the token where it is read, and intermediate words with their spellings."""

    name: str
    text: str
    words: tuple[tuple[str, ...], ...]


@checked
def read_evaluations(folder: str | Path) -> dict[str, list[EvaluationItem]]:
    """Read the evaluation sets in a folder, such as ``lens-eval-multihop.json``."""
    paths = {name: Path(folder).expanduser() / f"lens-eval-{name}.json" for name in EVALUATIONS}
    existing = {name: path for name, path in paths.items() if path.is_file()}
    if not existing:
        raise InputError(
            f"folder must have one or more of {', '.join(path.name for path in paths.values())}, got "
            f"{short(str(folder))}. They are in data/evaluations of the repository anthropics/jacobian-lens."
        )
    return {name: _read_items(name, path) for name, path in existing.items()}


def _read_items(name: str, path: Path) -> list[EvaluationItem]:
    content, items = read_json(path), []
    try:
        for number, row in enumerate(content["items"], start=1):
            text = row["prompt"].rstrip()
            if name == "poetry":
                text = row["prompt"][: row["prompt"].rindex("\n") + 1]
            words = row["intermediates"]
            if not text.strip() or not isinstance(words, list) or not words or not all(words):
                raise ValueError(f"a text and a list of words, not {short(row)}, in item {number}")
            spell = _spellings if name == "order-ops" else lambda word: (word,)
            words = tuple(map(spell, words))
            items.append(EvaluationItem(str(row.get("name", number)), text, words))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise InputError(f"{path} must hold the items of an evaluation, got {error!r}.") from error
    if not items:
        raise InputError(f"{path} must hold the items of an evaluation, got none.")
    return items


def _spellings(word: str) -> tuple[str, ...]:
    """A number as digits and as a word, an operation as its sign and as words."""
    if word.isascii() and word.isdigit() and int(word) < len(_NUMBERS):
        return word, _NUMBERS[int(word)]
    return word, *_OPERATIONS.get(word, ())


@checked
def word_tokens(model: TransformerBridge, spellings: Iterable[str]) -> list[int]:
    """Tokens of the words as given, in lower case and capitalized, with and without a leading space."""
    tokenizer = check_tokenizer(model)
    forms = {
        space + form
        for spelling in spellings
        for form in (spelling, spelling.lower(), spelling.capitalize())
        for space in ("", " ")
    }
    tokens = set()
    for form in forms:
        with suppress(InputError):  # several tokens, or unknown
            tokens.add(word_token(tokenizer, form, n_tokens=model.cfg.d_vocab))
    return sorted(tokens)


@checked
def evaluate_open_sets(
    lenses: Mapping[str, Lens],
    evaluations: Mapping[str, Sequence[EvaluationItem]],
    *,
    layers: Sequence[int] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """pass@1, 5 and 10 of each lens on each of `read_evaluations`, at the same tokens and layers.

    Intervals are Wilson's over items, see `matlens.metrics.share`.
    """
    if not lenses or not evaluations:
        raise InputError("lenses and evaluations must not be empty.")
    shared = set.intersection(*(set(lens.layers) for lens in lenses.values()))
    if layers is not None:
        shared = {lens.resolve(layer) for lens in lenses.values() for layer in layers}
    if not shared:
        raise InputError("layers must have at least one layer of all lenses.")
    model = next(iter(lenses.values())).model
    rows: list[dict[str, Any]] = []
    for name, items in Bar(list(evaluations.items()), desc="evaluating", disable=not progress):
        vectors = collect(
            model, make_prompts(model, [item.text for item in items]), sorted(shared), progress=False
        )
        tokens = [[word_tokens(model, spellings) for spellings in item.words] for item in items]
        for method, lens in lenses.items():
            lens.provenance.check_same(vectors.provenance, ours="the lens", theirs="the prompts")
            scored = [ranks for ranks in _best_ranks(lens, vectors, sorted(shared), tokens) if ranks]
            for k in KS:
                shares = [sum(rank < k for rank in ranks) / len(ranks) for ranks in scored]
                estimate = Estimate.without_interval(math.nan, 0)
                if shares:
                    n_words = sum(map(len, scored))
                    estimate = metrics.share(torch.tensor(shares, dtype=torch.float64), n_entries=n_words)
                rows.append(
                    result_row(
                        "lens_evaluation", model=vectors.provenance.model_name, corpus=name, method=method,
                        layer=None, target=lens.n_layers, metric="pass", k=k, estimate=estimate,
                    )
                )  # fmt: skip
    return result_table(rows)


def _best_ranks(
    lens: Lens, vectors: Activations, layers: Sequence[int], tokens: list[list[list[int]]]
) -> list[list[int]]:
    """Of each item and each of its words that has a token, the best rank over layers and spellings."""
    of_layers = []
    for layer in layers:
        logits = lens.logits(vectors[layer], layer)
        of_layers.append(
            [
                [int((scores > scores[ids].max()).sum()) for ids in words if ids]
                for scores, words in zip(logits, tokens, strict=True)
            ]
        )
    return [[min(ranks) for ranks in zip(*items, strict=True)] for items in zip(*of_layers, strict=True)]
