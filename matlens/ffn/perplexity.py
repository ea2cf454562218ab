"""Perplexity of a model, or of a changed one (paper B, Table 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt64
from scipy import stats
from torch import Tensor

from matlens.data.corpus import Corpus
from matlens.data.examples import Batch, Examples
from matlens.data.making import make_examples
from matlens.data.overlap import sentence_keys
from matlens.data.readers import check_decoder, check_own_tokens
from matlens.errors import InputError, PositiveInt, checked, warn
from matlens.metrics import Estimate
from matlens.numerics import check_finite, in_float64, log_softmax
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

MIN_TEXTS = 4  # for an interval that says something
BATCH_TOKENS = 512  # each has several distributions over the vocabulary in memory
_PLACES = 128  # whose distributions are computed together


class TextLosses(NamedTuple):
    """Loss of a model on each of ``n`` texts: ``-ln p`` summed over tokens, in nats.

    ``texts`` identifies each text by its tokens, see `matlens.data.overlap.sentence_keys`; None if unknown.
    """

    total: Float[np.ndarray, " n"]
    n_tokens: Int[np.ndarray, " n"]
    texts: UInt64[np.ndarray, " n"] | None = None

    def perplexity(self) -> Estimate:
        """``exp`` of the mean loss of all tokens of all texts, with its 95% interval over texts."""
        return _exp_of_mean(self.total, self.n_tokens)

    def ratio(self, unchanged: TextLosses) -> Estimate:
        """Perplexity relative to the original model's on the same texts, with a 95% interval over texts."""
        unknown = self.texts is None or unchanged.texts is None
        same = unknown or np.array_equal(self.texts, unchanged.texts)  # type: ignore[arg-type]
        if not same or not np.array_equal(self.n_tokens, unchanged.n_tokens):
            raise InputError(
                f"unchanged must be losses on the same {len(self.total)} texts in the same order, got "
                f"{len(unchanged.total)} others. Read the same examples with both models."
            )
        return _exp_of_mean(self.total - unchanged.total, unchanged.n_tokens)


@checked
@torch.inference_mode()
def text_losses(
    model: TransformerBridge,
    texts: Examples | Corpus | Sequence[str],
    *,
    batch_tokens: PositiveInt = BATCH_TOKENS,
    progress: bool = True,
) -> TextLosses:
    """``-ln p(token | tokens before it)``, summed over each text but its first token.

    Inside `controlled` it is the changed model that reads. ``texts`` are windows of running text, see
    `matlens.data.make_windows`, or separate texts.
    """
    check_decoder(model, "has no perplexity")
    examples = texts if isinstance(texts, Examples) else make_examples(model, texts)
    check_own_tokens(model, examples)
    total, n_tokens = np.zeros(len(examples)), examples.lengths - 1
    if not n_tokens.any():
        raise InputError("examples must have a text of at least two tokens, got none.")
    with Bar(total=len(examples), desc="perplexity", unit="text", disable=not progress) as bar:
        for batch in examples.batches(batch_tokens):
            total[batch.index] = _losses(model, batch).cpu().numpy()
            bar.update(len(batch.index))
    return TextLosses(total, n_tokens, sentence_keys(examples))


def _losses(model: TransformerBridge, batch: Batch) -> Float[Tensor, " batch"]:
    """``-ln p`` summed over the tokens of each text but its first, a few places at once."""
    tokens, mask = batch.tokens.to(model.cfg.device), batch.mask.to(model.cfg.device)
    logits = model(tokens, attention_mask=mask, return_type="logits")[:, :-1].float()
    following, real = tokens[:, 1:].to(logits.device), mask[:, 1:].bool().to(logits.device)
    check_finite(logits[mask[:, :-1].bool().to(logits.device)], "the logits")
    total = torch.zeros(())
    for start in range(0, logits.shape[1], _PLACES):
        part = slice(start, start + _PLACES)
        log_p = log_softmax(logits[:, part]).gather(2, following[:, part, None])[..., 0]
        lost = in_float64(log_p.where(real[:, part], torch.zeros_like(log_p))).sum(1)
        total = total.to(lost) - lost
    return total


def warn_of_few(n: int) -> None:
    """Issue an `InputWarning` if 95% intervals over ``n`` texts are too wide to be useful."""
    if n < MIN_TEXTS:
        warn(f"95% intervals over {n} texts are too wide to be useful. Use {MIN_TEXTS} or more.")


def _exp_of_mean(total: np.ndarray, n_tokens: np.ndarray) -> Estimate:
    """``exp(sum total / sum n_tokens)`` with its 95% interval over texts."""
    n, mean = len(total), total.sum() / n_tokens.sum()
    half = math.nan
    if n > 1:
        # The variance of a ratio of two sums, by the delta method.
        error = np.std(total - mean * n_tokens, ddof=1) / (n_tokens.mean() * math.sqrt(n))
        half = float(error * stats.t.ppf(0.975, n - 1))
    return Estimate(_exp(mean), _exp(mean - half), _exp(mean + half), n)


def _exp(nats: float) -> float:
    """``exp``, infinite where it overflows."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf
