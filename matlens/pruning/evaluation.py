"""What a pruned model loses on running text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from matlens import metrics
from matlens.data.examples import Examples
from matlens.data.readers import check_own_tokens
from matlens.errors import InputError, checked
from matlens.ffn.perplexity import TextLosses, perplexity_estimate, perplexity_ratio
from matlens.io.tables import result_row, result_table
from matlens.models.identity import ModelIdentity
from matlens.numerics.precision import in_float64
from matlens.numerics.probabilities import log_softmax
from matlens.parallel import Bar
from matlens.pruning.layouts import plain_copy
from matlens.pruning.pruned import Pruned
from matlens.pruning.streams import whole_windows

if TYPE_CHECKING:
    import pandas as pd
    from transformer_lens.model_bridge import TransformerBridge

EXPERIMENT = "pruning"
_FEWEST = 2  # windows to judge on
_TOKENS = 1024  # of a batch, each with its distribution over the vocabulary


class ReadText(NamedTuple):
    """What a model makes of texts: its losses, and the token it thinks most likely after each."""

    losses: TextLosses
    likeliest: Int[Tensor, "n length_less_1"]


@checked
def compare_pruned(
    model: TransformerBridge, pruned: Pruned, windows: Examples, *, progress: bool = True
) -> pd.DataFrame:
    """Perplexity of the whole and of the pruned model on the same windows, and how often both think alike.

    A row each: ``perplexity`` of the methods ``whole`` and ``pruned``, the ``ratio`` of the two, and
    ``agreement``, the share of places at which both think the same next token most likely; with 95%
    intervals.

    Parameters
    ----------
    model
        The whole model.
    pruned
        What was made of it.
    windows
        Running text that neither was calibrated on, see `matlens.data.make_windows`; windows that are
        shorter than the first are not read.
    progress
        Whether to show bars.

    Raises
    ------
    InputError
        The pruned model was made of another, the windows are of another way of making tokens, or there is
        only one.
    """
    check_made_of(pruned, model)
    check_own_tokens(model, windows)
    tokens = judged_tokens(windows)
    whole = read_text(plain_copy(model), tokens, desc="whole model", progress=progress)
    rest = read_text(pruned.model, tokens, desc="pruned model", progress=progress)
    estimates = [("whole", "perplexity", perplexity_estimate(whole.losses))]
    estimates += [("pruned", *estimate) for estimate in compare_texts(rest, whole).items()]
    return trial_table(pruned, str(windows.provenance.get("corpus", "unnamed")), estimates)


def compare_texts(rest: ReadText, whole: ReadText) -> dict[str, metrics.Estimate]:
    """Perplexity of a pruned model, its ratio to the original's, and the share of tokens predicted alike."""
    return {
        "perplexity": perplexity_estimate(rest.losses),
        "ratio": perplexity_ratio(rest.losses, whole.losses),
        "agreement": metrics.proportion((rest.likeliest == whole.likeliest).flatten()),
    }


def check_made_of(pruned: Pruned, model: TransformerBridge) -> None:
    """Refuse a pruned model beside a whole one that it was not made of."""
    identity = ModelIdentity.from_model(model)
    pruned.provenance.check_same(identity, ours="the pruned model", theirs="the whole model")


def trial_table(
    pruned: Pruned, corpus: str, estimates: Iterable[tuple[str, str, metrics.Estimate]]
) -> pd.DataFrame:
    """A row for each method, metric and estimate of one pruned model on a corpus, ``""`` for none."""
    rows = [
        result_row(
            EXPERIMENT, model=pruned.provenance.identity.name, corpus=corpus, method=method, layer=None,
            target=None, metric=metric, estimate=estimate, n_left_out=len(pruned.blocks),
            fold=pruned.method.value,
        )
        for method, metric, estimate in estimates
    ]  # fmt: skip
    return result_table(rows, "n_left_out", "fold")


def judged_tokens(windows: Examples) -> Int[Tensor, "n length"]:
    """The tokens of the whole windows of a text to evaluate on, two at least."""
    tokens = whole_windows(windows)
    if len(tokens) < _FEWEST:
        raise InputError(
            f"There is one whole window of {tokens.shape[1]} tokens to judge on, and no interval around what "
            "one says. Expected two at least: more text, or shorter windows."
        )
    return tokens


@torch.inference_mode()
def read_text(model: Any, tokens: Int[Tensor, "n length"], *, desc: str, progress: bool) -> ReadText:
    """Let a plain model read texts of equal length."""
    losses, likeliest = [], []
    with Bar(total=len(tokens), desc=desc, unit="window", disable=not progress) as bar:
        for part in tokens.split(max(1, _TOKENS // tokens.shape[1])):
            part = part.to(model.device)
            log_p = log_softmax(model(part, use_cache=False).logits[:, :-1].float())
            of_next = log_p.gather(2, part[:, 1:, None])[..., 0]
            if not bool(of_next.isfinite().all()):
                raise InputError(
                    "The pruned model's probabilities are not finite. Expected a larger penalty."
                )
            losses.append(-in_float64(of_next).sum(1).cpu())
            likeliest.append(log_p.argmax(-1).cpu())
            bar.update(len(part))
    total = torch.cat(losses).numpy()
    return ReadText(TextLosses(total, np.full(len(total), tokens.shape[1] - 1)), torch.cat(likeliest))
