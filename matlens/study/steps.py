"""The main job in four steps over one folder: collect, fit, evaluate, plot.

Each step reads what the one before has written and can be called again: what is collected and fitted is
not done twice, and what was broken off goes on. The folder holds ``train/`` and ``validation/``
(activations; of all positions ``moments/`` in the place of the first), ``maps/``, ``results.csv`` with
``results.json`` beside it, and the figures.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import torch
from tqdm.auto import tqdm

from matlens import plots
from matlens.activations.activations import Activations, Positions
from matlens.activations.collecting import collect
from matlens.activations.stored_moments import StoredMoments
from matlens.activations.sums import stream_moments
from matlens.arguments import require_number, require_whole
from matlens.corpora.corpus import Corpus
from matlens.corpora.examples import Examples, is_masked, make_examples
from matlens.errors import InputError, printable
from matlens.lens.quality import FIT, PREDICTION, fit_quality, prediction_quality
from matlens.linear.fitting import fit_samples, fitting_bar
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet, write_maps
from matlens.linear.pairs import Pairs, require_collected, resolve_pairs
from matlens.linear.samples import are_few
from matlens.linear.sums import solve_pairs
from matlens.models.anatomy import Anatomy
from matlens.models.identity import ModelIdentity
from matlens.models.readout import Readout
from matlens.processes.group import current
from matlens.signatures import checked
from matlens.stacks import ENCODER, stack_of
from matlens.storage.files import nearest_existing, system_errors
from matlens.storage.tables import COLUMNS, read_table, write_results
from matlens.study.output import MAPS, MOMENTS, RESULTS, TRAIN, VALIDATION
from matlens.study.plan import Shape, collected_bytes, require_disk, require_room_for_fit
from matlens.study.sizes import note_on_samples

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@checked
def collect_parts(
    model: TransformerBridge,
    parts: tuple[Corpus, Corpus],
    folder: str | Path,
    *,
    seed: int = 0,
    positions: Positions | Literal["auto"] = "drawn",
    draw_special: bool = True,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> tuple[Activations, Activations]:
    """Collect the stream on the two parts of a corpus, into ``train/`` and ``validation/``.

    Parameters
    ----------
    model
        What is run.
    parts
        The training and the validation sentences, as `Corpus.split` gives them.
    folder
        Where both are written.
    seed, draw_special
        As in `make_examples`.
    positions
        With ``"all"`` maps are fitted on every token of the training part; the validation part keeps one
        drawn position a sentence, so that its numbers compare. ``"auto"`` is ``"all"`` where the training
        sentences are fewer than twice the width of the model, and that is possible.
    batch_tokens, progress
        As in `collect`.

    Raises
    ------
    InputError
        All positions are asked for, and cannot be used.
    """
    if batch_tokens is not None:
        batch_tokens = require_whole(batch_tokens, "batch_tokens", least=1)
    require_usable(model, positions, draw_special)
    if len(parts) != 2:
        raise InputError(
            f"{len(parts)} parts of a corpus are given. Expected two, as Corpus.split gives them."
        )
    collected = []
    for name, part in zip((TRAIN, VALIDATION), parts, strict=True):
        examples = _examples_of(model, part, seed, draw_special)
        where: Positions = "drawn"
        if name == TRAIN:
            n_bytes = len(examples.tokens) * (model.cfg.n_layers + 1) * model.cfg.d_model * 4
            wanted = draw_special and positions == "auto"
            wanted = wanted and _all_are_better(model, examples, Path(folder), TRAIN, n_bytes)
            where = "all" if wanted or positions == "all" else "drawn"
        _require_room(model, examples, where, Path(folder) / name)
        collected.append(
            collect(
                model, examples, positions=where, folder=Path(folder) / name,
                batch_tokens=batch_tokens, progress=progress,
            )
        )  # fmt: skip
    return collected[0], collected[1]


def _require_room(model: TransformerBridge, examples: Examples, positions: Positions, folder: Path) -> None:
    """Refuse to begin what the disk has no room for; what was begun has taken its room."""
    if folder.exists():
        return
    n_rows = len(examples.tokens) if positions == "all" else examples.n_positions
    needed = collected_bytes(Shape.from_model(model), n_rows, len(examples.tokens), examples.n_positions)
    ways = "Collect fewer sentences, or write elsewhere (--out)."
    if positions == "all":
        ways = "One drawn token of each sentence takes far less (--positions drawn)."
    require_disk(needed, folder, f"Collecting {n_rows:,} vectors of each layer", ways)


@checked
def sum_parts(
    model: TransformerBridge,
    parts: tuple[Corpus, Corpus],
    folder: str | Path,
    *,
    pairs: Pairs = "all",
    seed: int = 0,
    positions: Positions | Literal["auto"] = "all",
    draw_special: bool = True,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Activations:
    """Do what `collect_parts` does, but of all positions keep what fits need, and no vectors.

    The moments are in ``moments/``, where ``train/`` would be; where only drawn positions are wanted, or
    vectors are there already, they are in ``train/`` as ever.

    Parameters
    ----------
    pairs
        Which maps can be fitted afterwards, as in `fit_maps`.
    model, parts, folder, seed, positions, draw_special, batch_tokens, progress
        As in `collect_parts`.

    Returns
    -------
    Activations
        The stream at the drawn positions of the validation sentences.
    """
    folder = Path(folder)
    there = _has_moments(folder)
    if not (folder / TRAIN).is_dir() and len(parts) == 2:
        examples = _examples_of(model, parts[0], seed, draw_special)
        chosen = training_positions(model, examples, folder, pairs, positions, draw_special=draw_special)
        if chosen == "all" or there:
            stream_moments(
                model, examples, folder / MOMENTS, pairs=pairs, positions=chosen, batch_tokens=batch_tokens,
                progress=progress,
            )  # fmt: skip
            return collect(
                model, _examples_of(model, parts[1], seed, draw_special), folder=folder / VALIDATION,
                batch_tokens=batch_tokens, progress=progress,
            )  # fmt: skip
        positions = chosen
    return collect_parts(
        model, parts, folder, seed=seed, positions=positions, draw_special=draw_special,
        batch_tokens=batch_tokens, progress=progress,
    )[1]  # fmt: skip


@checked
def training_positions(
    model: TransformerBridge,
    examples: Examples,
    folder: Path,
    pairs: Pairs,
    positions: Positions | Literal["auto"],
    *,
    draw_special: bool = True,
) -> Positions:
    """Which positions of the training sentences moments are kept of, as `collect_parts` says it.

    Raises
    ------
    InputError
        All positions are asked for, and cannot be used.
    """
    require_usable(model, positions, draw_special)
    if positions != "auto":
        return positions
    room = _room_of_moments(pairs, model)
    better = draw_special and _all_are_better(model, examples, folder, MOMENTS, room)
    return "all" if better else "drawn"


def require_usable(model: TransformerBridge, positions: str, draw_special: bool) -> None:
    """Refuse all positions where they cannot be used."""
    if positions == "all" and is_masked(model):
        raise InputError(
            "All positions of a masked-LM model cannot be used: only the drawn token of each sentence is "
            "masked, and the others are no predictions. Expected positions='drawn'."
        )
    if positions == "all" and not draw_special:
        raise InputError("All positions include the special tokens: skip them only with drawn positions.")


def _examples_of(model: TransformerBridge, part: Corpus, seed: int, draw_special: bool) -> Examples:
    examples = make_examples(model, part, seed=seed, draw_special=draw_special)
    if examples.n_truncated:
        tqdm.write(
            f"{examples.n_truncated} sentences of {printable(part.name)} were cut at the model's context."
        )
    return examples


def _room_of_moments(pairs: Pairs, model: TransformerBridge) -> int:
    """Bytes of the moments of these pairs."""
    wanted = resolve_pairs(pairs, model.cfg.n_layers)
    n_sources = len({source for source, _ in wanted})
    return 8 * (model.cfg.d_model + 1) ** 2 * (n_sources + len(wanted))


def _all_are_better(
    model: TransformerBridge, examples: Examples, folder: Path, name: str, n_bytes: int
) -> bool:
    """Whether maps need all positions of the examples, which are few, and the disk has room for them."""
    d_model = model.cfg.d_model
    if is_masked(model) or not are_few(len(examples), d_model):
        return False
    with system_errors(folder):
        free = shutil.disk_usage(nearest_existing(folder)).free
    if n_bytes > free / 2 and not (folder / name).exists():
        return False
    tqdm.write(
        f"{len(examples):,} sentences are few for {d_model:,} dimensions: the maps are fitted on all of "
        f"their {len(examples.tokens):,} tokens. --positions drawn takes one of each sentence.",
        file=sys.stderr,
    )
    return True


@checked
def fit_maps(
    folder: str | Path,
    *,
    pairs: Pairs = "all",
    intercept: bool = False,
    ridge: float | None = 0.0,
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
    if ridge is not None:
        require_number(ridge, "The ridge", least=0)  # before anything is read
    if _has_moments(Path(folder)):
        kept = StoredMoments(Path(folder) / MOMENTS)
        return fit_moments(
            kept, Path(folder) / MAPS, pairs=pairs, intercept=intercept, ridge=ridge, progress=progress
        )
    train = Activations.load(Path(folder) / TRAIN)
    wanted = resolve_pairs(pairs, train.provenance)
    require_collected(wanted, train)
    ridge = chosen_ridge(ridge, train, wanted)
    origin = train.provenance.samples.with_details(n_samples=train.n_rows, intercept=intercept, ridge=ridge)
    if note := note_on_samples(origin.to_json()):
        tqdm.write(note, file=sys.stderr)

    def fit(missing: list[tuple[str, str]]) -> Iterable[LinearMap]:
        if missing:
            require_room_for_fit(train.n_rows, train.provenance.identity, missing)
        maps = fit_samples(train, missing, intercept=intercept, ridge=ridge)
        return fitting_bar(maps, len(missing), progress=progress)

    return write_maps(Path(folder) / MAPS, wanted, fit, origin)


def _has_moments(folder: Path) -> bool:
    """Whether the training part is there as moments, and not as vectors."""
    return (folder / MOMENTS / "config.json").is_file() and not (folder / TRAIN).is_dir()


@checked
def fit_moments(
    moments: StoredMoments,
    folder: str | Path,
    *,
    pairs: Pairs | None = None,
    intercept: bool = False,
    ridge: float | None = 0.0,
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
    if ridge is not None:
        require_number(ridge, "The ridge", least=0)
    moments.require_complete()
    there = [(source, target) for source, targets in moments.targets.items() for target in targets]
    wanted = there if pairs is None else resolve_pairs(pairs, moments.provenance)
    penalty = ridge
    if penalty is None:
        few = are_few(moments.n_samples, moments.provenance.identity.d_model)
        penalty = _typical(list(map(moments.norms, dict.fromkeys(a for a, _ in wanted)))) if few else 0.0
    origin = moments.provenance.samples.with_details(
        n_samples=moments.n_samples, intercept=intercept, ridge=penalty
    )
    if note := note_on_samples(origin.to_json()):
        tqdm.write(note, file=sys.stderr)

    def fit(missing: list[tuple[str, str]]) -> Iterable[LinearMap]:
        if not current().leads:
            return iter(())
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
        return require_number(ridge, "The ridge", least=0)
    few = are_few(samples.n_rows if n_fitted is None else n_fitted, samples.provenance.identity.d_model)
    return typical_penalty(samples, dict.fromkeys(source for source, _ in pairs)) if few else 0.0


def typical_penalty(samples: Activations, sources: Iterable[str]) -> float:
    """A ridge that holds back what few samples do not settle: the squared norm of a typical sample.

    The median over samples, and of these the median over sources, to two digits. What one sample says in a
    direction weighs no more then than the penalty does.
    """
    return _typical([samples[source].double().square().sum(1) for source in sources])


def _typical(norms: Sequence[torch.Tensor | None]) -> float:
    """The median over sources of the median of the samples' squared norms, to two digits."""
    medians = [of_source.median() for of_source in norms if of_source is not None and len(of_source)]
    return float(f"{float(torch.stack(medians).median()):.1e}") if medians else 0.0


@checked
def evaluate_maps(
    model: TransformerBridge,
    folder: str | Path,
    *,
    readout: Readout | None = None,
    same_precision: bool = True,
    progress: bool = True,
) -> pd.DataFrame:
    """Evaluate ``maps/`` on ``validation/``, into ``results.csv`` and ``results.json``.

    Predictions are read from maps onto the last layer; where there are none, or the model is an encoder,
    which predicts nothing, only r2 is evaluated.

    Parameters
    ----------
    model, folder
        The model, and the folder of the maps.
    readout
        The model's read-out, where it has been made already.
    same_precision
        Whether the model must run in the precision that the maps were fitted in. With ``False`` the same
        weights may predict in another one.
    progress
        Whether to show bars.
    """
    folder = Path(folder)
    maps = MapSet.load(folder / MAPS, same_precision=same_precision)
    validation = Activations.load(folder / VALIDATION)
    validation.provenance = replace(validation.provenance, same_precision=same_precision)
    maps.provenance.require_same(ModelIdentity.from_model(model), ours="the maps")
    sources = {
        TRAIN: lambda: Activations.load(folder / TRAIN).provenance,
        MOMENTS: lambda: StoredMoments(folder / MOMENTS).provenance,
    }
    for name in [name for name in sources if (folder / name / "config.json").is_file()][:1]:
        fitted, there = maps.provenance.samples.to_json(), sources[name]().samples.to_json()
        differing = [key for key in there if fitted.get(key) != there[key]]
        if differing:
            raise InputError(
                f"The maps in {folder / MAPS} were fitted on other samples than {folder / name} holds "
                f"({', '.join(differing)} differ), so they may have seen the validation sentences. Remove "
                f"{folder / MAPS} and fit again."
            )
    parts = [fit_quality(maps, validation, progress=progress)]
    last = str(Anatomy.from_model(model).stream[-1])
    if stack_of(model) != ENCODER and any(target == last for _, target in maps):
        parts.append(prediction_quality(readout or Readout(model), maps, validation, progress=progress))
    results = pd.concat([part.astype({"k": "Int64"}) for part in parts], ignore_index=True)
    write_results(folder, RESULTS, results, origin_of(maps, validation))
    return results


@checked
def origin_of(maps: MapSet, validation: Activations) -> dict[str, Any]:
    """What maps were fitted on, whether that is enough for them, and what they were tested on."""
    fit = maps.provenance.to_json()
    validated = validation.provenance.to_json("data")["data"]
    return {"maps": fit, "note": note_on_samples(fit), "validation": validated}


@checked
def plot_results(folder: str | Path, *, title: str | None = None) -> list[Path]:
    """Draw ``r2`` and ``prediction`` from ``results.csv``, as PNG and PDF; returns what was written.

    Parameters
    ----------
    title
        Title of both figures, instead of their own.
    """
    results = read_results(folder)
    figures = (("r2", plots.r2_heatmaps, FIT), ("prediction", plots.prediction, PREDICTION))
    written = []
    for name, draw, experiment in figures:
        part = results[results["experiment"] == experiment]
        if not part.empty:
            written += plots.save(draw(part), folder, name, title=title)
            continue
        for suffix in ("png", "pdf"):  # a figure of an earlier table
            (Path(folder) / f"{name}.{suffix}").unlink(missing_ok=True)
    return written


@checked
def read_results(folder: str | Path) -> pd.DataFrame:
    """Read the table that `evaluate_maps` has written.

    Raises
    ------
    InputError
        There is none, or its columns are others.
    """
    path = Path(folder) / f"{RESULTS}.csv"
    numbers = dict.fromkeys(("layer", "target", "n"), "int64") | dict.fromkeys(
        ("value", "low", "high"), "float64"
    )
    results = read_table(
        path, dict.fromkeys(COLUMNS, "str") | numbers | {"k": "Int64"}, what="a table of results",
        made_by="'matlens evaluate' writes it.", keep_default_na=True,
    )  # fmt: skip
    # Maps between other sites than the stream's have their sites in the name.
    methods = {method for method in results["method"] if not method.startswith("mat ")}
    if FIT not in set(results["experiment"]) or not methods <= {"mat", "id"}:
        raise InputError(
            f"{path} is not a whole table of results: expected rows of {FIT}, for the methods "
            "mat and id. 'matlens evaluate' writes it."
        )
    return results
