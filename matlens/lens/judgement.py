"""Predictions in the place of those of ``h^L``, against these, token by token (definitions, 4 and 9)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens import metrics
from matlens.errors import InputError, checked, short
from matlens.models.readout import Readout
from matlens.models.sites import check_finite
from matlens.numerics.probabilities import kl_divergence, log_softmax
from matlens.parallel import Bar

KS = (1, 5, 10)
_ROWS = 256  # tokens whose distributions are held at once
Key = TypeVar("Key", bound=Hashable)
Scores = Callable[[slice], Float[Tensor, "rows d_vocab"]]
Substitute = Callable[[slice], Float[Tensor, "rows d_model"]]


@checked
class Judgement(NamedTuple):
    """What is predicted at each token against what the model does.

    Attributes
    ----------
    rank
        The rank in the model's distribution of the first token of the judged one, 1 for the same token.
    surprisal
        ``-ln p`` of that first token, by the model's distribution.
    divergence
        ``KL(p || q)``, of the model's distribution from the judged one; ``None`` where it was not asked for.
    """

    rank: Int[Tensor, " n"]
    surprisal: Float[Tensor, " n"]
    divergence: Float[Tensor, " n"] | None = None

    def values(self) -> dict[tuple[str, int | None], Float[Tensor, " n"]]:
        """The measures that are means over tokens: by name and, for Precision@k, k."""
        hits: dict[tuple[str, int | None], Tensor] = {("precision", k): (self.rank <= k).double() for k in KS}
        hits["surprisal", None] = self.surprisal.double()
        return hits if self.divergence is None else hits | {("kl", None): self.divergence.double()}

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
        return {key: metrics.mean(ours - theirs[key]) for key, ours in self.values().items() if key in theirs}


@checked
def judge_scores(
    readout: Readout,
    truth: Float[Tensor, "n d_model"],
    members: Mapping[Key, Scores],
    *,
    divergence: bool = True,
    progress: bool = True,
) -> dict[Key, Judgement]:
    """Compare what members predict with what ``h^L`` itself does, all on the same tokens.

    Scores that are not finite predict nothing: their rank is one more than there are tokens, and their
    surprisal and their divergence are infinite.

    Parameters
    ----------
    readout
        The read-out of the model.
    truth
        ``h^L``.
    members
        Functions that give the scores of a slice of the rows, by any name.
    divergence
        Whether divergences are computed, which takes about a third longer.
    progress
        Whether to show a bar.

    Raises
    ------
    InputError
        There is no member or no token, or its scores are not of all tokens; or those of ``h^L`` itself are
        not finite.
    """
    n = len(truth)
    if not members or not n:
        raise InputError("There is nothing to judge. Expected one member or more, and one token or more.")
    judged = {
        key: Judgement(
            torch.empty(n, dtype=torch.long), torch.empty(n), torch.empty(n) if divergence else None
        )
        for key in members
    }
    with readout.weights.constant():
        for part in Bar(list(chunks(n)), desc="predictions", disable=not progress):
            true = readout.log_probs(truth[part])
            check_finite(true, "the read-out")
            for key, member in members.items():
                scores = member(part)
                if scores.shape != true.shape:
                    raise InputError(
                        f"The scores of {short(key)} have the shape {tuple(scores.shape)}. Expected those of "
                        f"{true.shape[-1]} tokens for each of {len(true)} rows."
                    )
                _fill(judged[key], part, true, scores)
    return judged


def _fill(judged: Judgement, part: slice, true: Tensor, scores: Tensor) -> None:
    sound = scores.isfinite().all(-1)
    token = scores.argmax(-1)
    rank, surprisal = metrics.rank(true, token), metrics.surprisal(true, token)
    judged.rank[part] = rank.where(sound, torch.full_like(rank, true.shape[-1] + 1)).cpu()
    judged.surprisal[part] = surprisal.where(sound, torch.inf).cpu()
    if judged.divergence is not None:
        divergence = kl_divergence(true, log_softmax(scores))
        judged.divergence[part] = divergence.where(sound, torch.inf).cpu()


@checked
def judge_predictions(
    readout: Readout,
    truth: Float[Tensor, "n d_model"],
    substitutes: Mapping[Key, Substitute],
    *,
    progress: bool = True,
) -> dict[Key, Judgement]:
    """Compare what substitutes for ``h^L`` predict with what ``h^L`` itself does: ranks and surprisals.

    A substitute that is not finite, or whose squares are not, predicts nothing, see `judge_scores`.

    Parameters
    ----------
    readout
        The read-out of the model.
    truth
        ``h^L``.
    substitutes
        Functions that give a substitute's rows of a slice, by any name.
    progress
        Whether to show a bar.

    Raises
    ------
    InputError
        There is no substitute, or no token.
    """
    members = {key: _scores_of(readout, substitute) for key, substitute in substitutes.items()}
    return judge_scores(readout, truth, members, divergence=False, progress=progress)


def _scores_of(readout: Readout, substitute: Substitute) -> Scores:
    def scores(part: slice) -> Tensor:
        h = substitute(part).float()
        # A norm whose squares overflow would make something of it all the same.
        readable = h.square().sum(-1).isfinite()
        logits = readout.logits(h.where(readable[:, None], torch.zeros_like(h)))
        return logits.where(readable.to(logits.device)[:, None], torch.nan)

    return scores


def chunks(n: int) -> Iterator[slice]:
    """Slices of as many examples as have their distributions in memory at once."""
    return (slice(start, start + _ROWS) for start in range(0, n, _ROWS))


@checked
def as_substitute(vectors: Float[Tensor, "n d_model"]) -> Substitute:
    """Substitutes whose vectors have been computed already."""
    return lambda part: vectors[part]
