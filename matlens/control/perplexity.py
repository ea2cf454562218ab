"""Perplexity on sentences: what a changed model loses as a model of language (paper B, Table 5)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import stats
from torch import Tensor
from tqdm.auto import tqdm

from matlens.control.baselines import SelfDebiasing, announced_tokens
from matlens.corpora.corpus import Corpus
from matlens.corpora.examples import Batch, is_masked, make_examples
from matlens.errors import InputError
from matlens.metrics import Estimate
from matlens.models.sites import require_finite

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_TOKENS = 512  # of a batch; each has its distribution over the vocabulary held, several times over


class SentenceLosses(NamedTuple):
    """What a model loses on each of ``n`` sentences: the sum of ``-ln p``, and of how many tokens."""

    lost: Float[np.ndarray, " n"]
    counted: Int[np.ndarray, " n"]


@torch.inference_mode()
def sentence_losses(
    model: TransformerBridge,
    corpus: Corpus,
    *,
    debiasing: SelfDebiasing | None = None,
    batch_tokens: int = _TOKENS,
    progress: bool = True,
) -> SentenceLosses:
    """``-ln p(token | tokens before it)``, summed over each sentence, in nats.

    The first token of a sentence, which nothing precedes, does not count. Inside of `controlled` it is the
    changed model that reads. WordFilter loses without bound: a banned word's probability is zero.

    Parameters
    ----------
    model, corpus
        What reads what.
    debiasing
        For what is lost under `SelfDebiasing`: every sentence is read after each announcement too.
    batch_tokens
        Most tokens of a batch, padding counted. It does not change the numbers.

    Raises
    ------
    InputError
        The model predicts no next token, no sentence has two tokens, or the logits are not finite.
    """
    if is_masked(model):
        raise InputError(
            f"{model.cfg.architecture} predicts masked tokens, not the next one, so it has no perplexity. "
            "Expected a decoder."
        )
    examples = make_examples(model, corpus)
    lost, counted = np.zeros(len(examples)), examples.lengths - 1
    if not counted.any():
        raise InputError("No sentence has two tokens, so there is no next token to predict.")
    with tqdm(total=len(examples), desc="perplexity", unit="sentence", disable=not progress, delay=1) as bar:
        for batch in examples.batches(batch_tokens):
            log_p = _log_probs(model, batch, debiasing)
            own = log_p.gather(2, batch.tokens[:, 1:, None].to(log_p.device))[:, :, 0].double()
            meant = batch.mask[:, 1:].bool().to(own.device)
            lost[batch.index] = -own.where(meant, torch.zeros_like(own)).sum(1).cpu().numpy()
            bar.update(len(batch.index))
    return SentenceLosses(lost, counted)


def perplexity_estimate(losses: SentenceLosses) -> Estimate:
    """``exp`` of the mean loss of all tokens of all sentences, with its 95% interval over sentences."""
    return _ratio(losses.lost, losses.counted)


def perplexity_ratio(losses: SentenceLosses, unchanged: SentenceLosses) -> Estimate:
    """How many times as large a changed model's perplexity is, with its 95% interval over sentences.

    Both have read the same sentences, so the interval is far narrower than those of the two perplexities.
    """
    return _ratio(losses.lost - unchanged.lost, unchanged.counted)


def _log_probs(
    model: TransformerBridge, batch: Batch, debiasing: SelfDebiasing | None
) -> Float[Tensor, "batch length_less_1 d_vocab"]:
    """``ln p`` of every token at every place but the first."""
    plain = _logits(model, batch.tokens, batch.mask)
    if debiasing is None:
        return plain.log_softmax(-1)
    announced = []
    for prefix in debiasing.prefixes:
        rows = [announced_tokens(model.tokenizer, prefix, row) for row in batch.tokens.tolist()]
        added = len(rows[0]) - batch.tokens.shape[1]
        mask = torch.cat([torch.ones(len(rows), added, dtype=batch.mask.dtype), batch.mask], 1)
        announced.append(_logits(model, torch.tensor(rows), mask)[:, added:])
    return debiasing.log_probs(plain, torch.stack(announced))


def _logits(model: TransformerBridge, tokens: Tensor, mask: Tensor) -> Float[Tensor, "batch places d_vocab"]:
    """Logits in float32 after every token but the last."""
    device = model.cfg.device
    logits = model(tokens.to(device), attention_mask=mask.to(device), return_type="logits")[:, :-1].float()
    require_finite(logits[mask[:, :-1].bool().to(device)], "the logits")
    return logits


def _ratio(lost: np.ndarray, counted: np.ndarray) -> Estimate:
    """``exp(sum lost / sum counted)`` with its 95% interval over sentences."""
    n, mean = len(lost), lost.sum() / counted.sum()
    half = math.nan
    if n > 1:
        # A ratio of two sums varies as its residuals do (the delta method).
        error = np.std(lost - mean * counted, ddof=1) / (counted.mean() * math.sqrt(n))
        half = float(error * stats.t.ppf(0.975, n - 1))
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n)
