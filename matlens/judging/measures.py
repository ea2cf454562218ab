"""How well lenses predict, token by token, so that two can be compared on the same ones (definitions, 9)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from matlens import metrics
from matlens.arguments import require_rows, short
from matlens.errors import InputError
from matlens.lens.lens import Lens
from matlens.lens.quality import chunks
from matlens.models.readout import Readout
from matlens.models.sites import require_finite
from matlens.progress import Bar
from matlens.signatures import checked

KS = (1, 5, 10)
Key = TypeVar("Key", bound=Hashable)
Scores = Callable[[slice], Float[Tensor, "rows d_vocab"]]


@checked
class Judgement(NamedTuple):
    """What a lens predicts at each token against what the model does.

    Attributes
    ----------
    rank
        How many tokens are more probable to the model than the lens's first.
    surprisal
        ``-ln p`` of the lens's first token, by the model's distribution.
    divergence
        ``KL(p || q)``, of the model's distribution from the lens's.
    """

    rank: Int[Tensor, " n"]
    surprisal: Float[Tensor, " n"]
    divergence: Float[Tensor, " n"]

    def values(self) -> dict[tuple[str, int | None], Float[Tensor, " n"]]:
        """The measures that are means over tokens: by name and, for Precision@k, k."""
        hits: dict[tuple[str, int | None], Tensor] = {("precision", k): (self.rank < k).double() for k in KS}
        return hits | {("surprisal", None): self.surprisal.double(), ("kl", None): self.divergence.double()}

    def estimates(self) -> dict[tuple[str, int | None], metrics.Estimate]:
        """Each measure with its 95% interval: Wilson's for Precision@k, Student's for the others."""
        return {
            key: metrics.proportion(values > 0) if key[0] == "precision" else metrics.mean(values)
            for key, values in self.values().items()
        }

    def differences(self, other: Judgement) -> dict[tuple[str, int | None], metrics.Estimate]:
        """Each measure less another judgement's, with the 95% interval of the paired differences.

        Raises
        ------
        InputError
            They are not of as many tokens.
        """
        if len(self.rank) != len(other.rank):
            raise InputError(
                f"Judgements of {len(self.rank)} and of {len(other.rank)} tokens cannot be paired. Expected "
                "both of the same tokens."
            )
        theirs = other.values()
        return {key: metrics.mean(ours - theirs[key]) for key, ours in self.values().items()}


@checked
def judge_scores(
    readout: Readout,
    truth: Float[Tensor, "n d_model"],
    members: Mapping[Key, Scores],
    *,
    progress: bool = True,
) -> dict[Key, Judgement]:
    """Compare what members predict with what ``h^L`` itself does, all on the same tokens.

    Parameters
    ----------
    readout
        The read-out of the model.
    truth
        ``h^L``.
    members
        Functions that give the scores of a slice of the rows, by any name.
    progress
        Whether to show a bar.

    Raises
    ------
    InputError
        There is no member or no token, or a member's scores are not finite.
    """
    n = len(truth)
    if not members or not n:
        raise InputError("There is nothing to judge. Expected one member or more, and one token or more.")
    judged = {
        key: Judgement(torch.empty(n, dtype=torch.long), torch.empty(n), torch.empty(n)) for key in members
    }
    for part in Bar(list(chunks(n)), desc="judging", disable=not progress):
        true = readout.log_probs(truth[part])
        require_finite(true, "the read-out")
        for key, scores in members.items():
            log_q = scores(part).log_softmax(-1)
            if log_q.shape != true.shape or not bool(log_q.isfinite().all()):
                raise InputError(
                    f"The scores of {short(key)} are not finite, or not of all tokens. Expected scores of "
                    f"{true.shape[-1]} tokens for each row."
                )
            token = log_q.argmax(-1)
            judged[key].rank[part] = metrics.rank(true, token).cpu()
            judged[key].surprisal[part] = metrics.surprisal(true, token).cpu()
            judged[key].divergence[part] = (true.exp() * (true - log_q)).sum(-1).cpu()
    return judged


@checked
def lens_scores(lens: Lens, h: Float[Tensor, "n d_model"], layer: int) -> Scores:
    """What a lens reads out of vectors of a layer, slice by slice."""
    return lambda part: lens.logits(h[part].to(lens.on_readout.device), layer)


@checked
def lens_r2(
    lens: Lens,
    h: Float[Tensor, "n d_model"],
    last: Float[Tensor, "n d_model"],
    layer: int,
    *,
    rows: Bool[Tensor, " n"] | None = None,
) -> metrics.Estimate:
    """Share of the variance of what a lens stands in for: of ``h^L``, or of ``h^L`` standardised.

    Parameters
    ----------
    lens
        The lens. One that maps standardised vectors is held to standardised ones.
    h, last, layer
        ``h^l`` and ``h^L``, row by row, and ``l``.
    rows
        True for the rows that count, by default all.

    Raises
    ------
    InputError
        Fewer than two rows are left.
    """
    if len(h) != len(last):
        raise InputError(
            f"There are {len(h)} vectors of the layer and {len(last)} of the last. Expected pairs."
        )
    require_rows(rows, len(h), least=2)
    counted: Any = slice(None) if rows is None else rows
    h, last = h[counted], last[counted]
    truth = last if lens.norm is None else lens.norm(last.double())
    score = metrics.r2(lens(h, layer), truth)
    return metrics.Estimate(score, float("nan"), float("nan"), len(last))
