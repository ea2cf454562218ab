"""Maps of a study, fitted on the vectors or moments of its training part, into ``maps/``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from matlens import parallel
from matlens.activations.activations import Activations
from matlens.activations.stored_moments import StoredMoments
from matlens.errors import NonNegative, checked
from matlens.linear.fitting import fit_samples, fitting_bar
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet, write_maps
from matlens.linear.pairs import Pairs, check_collected, resolve_pairs
from matlens.linear.samples import NoisyFit, are_few, warn_of_noise
from matlens.linear.sums import solve_pairs
from matlens.numerics.precision import in_float64
from matlens.study.output import MAPS, MOMENTS, TRAIN, has_moments
from matlens.study.plan import check_fit, check_solve


@checked
def fit_maps(
    folder: str | Path,
    *,
    pairs: Pairs = "all",
    intercept: bool = False,
    ridge: NonNegative | None = 0.0,
    progress: bool = True,
) -> MapSet:
    """Fit maps between layers of the stream on ``train/`` or ``moments/``, into ``maps/``.

    Parameters
    ----------
    pairs
        ``"all"`` for every ``0 <= l < l' <= L``, ``"last"`` for those onto ``L``, or a list of pairs.
    intercept, ridge
        Off by default, as in the paper. Without a number, the penalty is 0 where samples are at least twice
        as many as the width of the model, and else what `typical_penalty` gives.
    """
    if has_moments(Path(folder)):
        kept = StoredMoments(Path(folder) / MOMENTS)
        return fit_moments(
            kept, Path(folder) / MAPS, pairs=pairs, intercept=intercept, ridge=ridge, progress=progress
        )
    train = Activations.load(Path(folder) / TRAIN)
    wanted = resolve_pairs(pairs, train.provenance)
    check_collected(wanted, train)
    ridge = chosen_ridge(ridge, train, wanted)
    origin = train.provenance.samples.with_details(n_samples=train.n_rows, intercept=intercept, ridge=ridge)

    def fit(missing: list[tuple[str, str]]) -> Iterable[LinearMap]:
        if not missing:
            return ()
        check_fit(train.n_rows, train.provenance.identity.d_model, missing)
        maps = fit_samples(train, missing, intercept=intercept, ridge=ridge)
        return fitting_bar(maps, len(missing), progress=progress)

    return write_maps(Path(folder) / MAPS, wanted, fit, origin)


@checked
def fit_moments(
    moments: StoredMoments,
    folder: str | Path,
    *,
    pairs: Pairs | None = None,
    intercept: bool = False,
    ridge: NonNegative | None = 0.0,
    progress: bool = True,
) -> MapSet:
    """Fit maps on moments of one folder, or of all shards of a job, into a folder of maps.

    Parameters
    ----------
    moments
        What `matlens.activations.stream_moments` has written.
    folder
        Where the maps are written.
    pairs
        Which maps, by default all of which moments were kept.
    intercept, ridge, progress
        As in `fit_maps`.

    Raises
    ------
    InputError
        A shard of the job is missing, there are no samples, or no moments were kept of a pair.
    """
    moments.check_complete()
    there = [(source, target) for source, targets in moments.targets.items() for target in targets]
    wanted = there if pairs is None else resolve_pairs(pairs, moments.provenance)
    penalty = ridge
    if penalty is None:
        few = are_few(moments.n_samples, moments.provenance.identity.d_model)
        penalty = (
            _typical([moments[source].norms for source in dict.fromkeys(a for a, _ in wanted)])
            if few
            else 0.0
        )
    origin = moments.provenance.with_details(  # which say what was chosen of the samples
        n_samples=moments.n_samples, intercept=intercept, ridge=penalty
    )

    def fit(missing: list[tuple[str, str]]) -> Iterable[LinearMap]:
        if not parallel.is_main():
            return iter(())
        if missing:
            check_solve(moments, missing)
            n, width = moments.n_samples, moments.provenance.identity.d_model
            if not penalty and are_few(n, width):  # of moments alone no sample can be left out
                warn_of_noise([NoisyFit("maps", n, width)], 1)
        maps = solve_pairs(moments, missing, intercept=intercept, ridge=penalty, provenance=origin)
        return fitting_bar(maps, len(missing), progress=progress)

    return write_maps(folder, wanted, fit, origin)


def chosen_ridge(
    ridge: float | None,
    samples: Activations,
    pairs: Iterable[tuple[str, str]],
    *,
    n_fitted: int | None = None,
) -> float:
    """The penalty of `fit_maps` for maps that are fitted on ``n_fitted`` of some samples, by default all."""
    if ridge is not None:
        return ridge
    few = are_few(samples.n_rows if n_fitted is None else n_fitted, samples.provenance.identity.d_model)
    return typical_penalty(samples, dict.fromkeys(source for source, _ in pairs)) if few else 0.0


def typical_penalty(samples: Activations, sources: Iterable[str]) -> float:
    """A ridge that holds back what few samples do not settle: the squared norm of a typical sample.

    The median over samples, and of these the median over sources, to two digits. What one sample says in a
    direction weighs no more then than the penalty does.
    """
    return _typical([in_float64(samples[source]).square().sum(1) for source in sources])


def _typical(norms: Sequence[torch.Tensor | None]) -> float:
    """The median over sources of the median of the samples' squared norms, to two digits."""
    medians = [of_source.median() for of_source in norms if of_source is not None and len(of_source)]
    return float(f"{float(torch.stack(medians).median()):.1e}") if medians else 0.0
