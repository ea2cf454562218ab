"""Perplexity on sentences: what a changed model loses as a model of language (paper B, Table 5)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import stats
from torch import Tensor

from matlens.arguments import require_whole
from matlens.control.baselines import SelfDebiasing, announced_tokens
from matlens.corpora.corpus import Corpus
from matlens.corpora.examples import Batch, is_masked, make_examples
from matlens.errors import InputError
from matlens.metrics import Estimate
from matlens.models.sites import require_finite
from matlens.progress import Bar
from matlens.signatures import checked

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_TOKENS = 512  # of a batch; each has its distribution over the vocabulary held, several times over


class SentenceLosses(NamedTuple):
    """The loss of a model on each of ``n`` sentences.

    Attributes
    ----------
    total
        ``-ln p`` summed over the tokens of the sentence.
    n_tokens
        How many tokens the sum is over.
    """

    total: Float[np.ndarray, " n"]
    n_tokens: Int[np.ndarray, " n"]


@checked
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
        A model, and the sentences that it reads.
    debiasing
        Self-Debiasing to measure the losses under: every sentence is read after each announcement too.
    batch_tokens
        Most tokens of a batch, padding counted. It does not change the numbers.
    progress
        Whether to show a bar over the sentences.

    Raises
    ------
    InputError
        The model predicts no next token, no sentence has two tokens, or the logits are not finite.
    """
    require_whole(batch_tokens, "batch_tokens", least=1)
    if is_masked(model):
        raise InputError(
            f"{model.cfg.architecture} predicts masked tokens, not the next one, so it has no perplexity. "
            "Expected a decoder."
        )
    examples = make_examples(model, corpus)
    total, n_tokens = np.zeros(len(examples)), examples.lengths - 1
    if not n_tokens.any():
        raise InputError("No sentence has two tokens, so there is no next token to predict.")
    with Bar(total=len(examples), desc="perplexity", unit="sentence", disable=not progress) as bar:
        for batch in examples.batches(batch_tokens):
            log_p = _log_probs(model, batch, debiasing)
            of_tokens = log_p.gather(2, batch.tokens[:, 1:, None].to(log_p.device))[:, :, 0].double()
            real = batch.mask[:, 1:].bool().to(of_tokens.device)
            total[batch.index] = -of_tokens.where(real, torch.zeros_like(of_tokens)).sum(1).cpu().numpy()
            bar.update(len(batch.index))
    return SentenceLosses(total, n_tokens)


@checked
def perplexity_estimate(losses: SentenceLosses) -> Estimate:
    """``exp`` of the mean loss of all tokens of all sentences, with its 95% interval over sentences."""
    return _exp_of_mean(losses.total, losses.n_tokens)


@checked
def perplexity_ratio(losses: SentenceLosses, unchanged: SentenceLosses) -> Estimate:
    """Perplexity of a changed model over that of the unchanged one, with its 95% interval over sentences.

    Both models have read the same sentences, so the interval is far narrower than those of the two
    perplexities.

    Parameters
    ----------
    losses, unchanged
        Losses of the changed and of the unchanged model, see `sentence_losses`.
    """
    return _exp_of_mean(losses.total - unchanged.total, unchanged.n_tokens)


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


def _exp_of_mean(total: np.ndarray, n_tokens: np.ndarray) -> Estimate:
    """``exp(sum total / sum n_tokens)`` with its 95% interval over sentences."""
    n, mean = len(total), total.sum() / n_tokens.sum()
    half = math.nan
    if n > 1:
        # A ratio of two sums varies as its residuals do (the delta method).
        error = np.std(total - mean * n_tokens, ddof=1) / (n_tokens.mean() * math.sqrt(n))
        half = float(error * stats.t.ppf(0.975, n - 1))
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n)
