"""How linear a model is over its training: r2 of every part, and Precision@1 of mat, by checkpoint.

At each checkpoint maps are fitted and evaluated on the same sentences: r2 and loss increase of attention,
FFN and block as in ``analyses/linearity.py``, Precision@1 of ``mat`` and ``id`` onto the last layer as in
paper A, and the model's own loss. ``constant`` always predicts the model's most frequent prediction:
early in training a model predicts few distinct tokens, so any lens has a high precision.

By default a GPT-2 of 4 layers is trained as in ``analyses/small_gpts.py``, and saved before the first update
and after 2, 4, 8, ..., 2,048. For a model on the hub, give revisions whose names end with the update::

    python analyses/linearity_training.py --model EleutherAI/pythia-70m --revisions step0,step8,step64,step512

``--model`` can also be a local folder with a folder for each revision, such as ``checkpoint-500``. An
interrupted run resumes.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from figures.beyond import over_training
from small_gpts import train_gpt
from studies import SECONDS, AtlasText, Cells, Report, Study, TwoOrMore, run_study

import matlens
from matlens import InputError, MapSet, Readout, collect, metrics
from matlens.activations import Activations
from matlens.data import make_examples
from matlens.errors import Between, PositiveInt
from matlens.ffn import text_losses
from matlens.io import csv_text, result_row, result_table
from matlens.lens import prediction_quality
from matlens.linearity import linearity_atlas
from matlens.metrics import Estimate
from matlens.models import ModelIdentity
from matlens.parallel import Bar
from matlens.study import slug

NAME = "linearity_training"
COLUMNS = ("kind", "tokens", "step")
KINDS, SCORES = ["attn", "ffn", "block"], ["r2", "r2 of the variance", "loss increase"]
WINDOW = 64
SENTENCES = {"fit_sentences": 4000, "sentences": 1000}  # to fit mat on; to evaluate mat and the loss on


def main(
    study: Study,
    report: Report,
    model: str | None = None,
    revisions: str | None = None,
    updates: PositiveInt = 2048,
    layers: PositiveInt = 4,
    pieces: Annotated[int, Between(258)] = 4000,
    windows: TwoOrMore = 160,
    eval_windows: TwoOrMore = 32,
) -> None:
    """Train a model or name its checkpoints, evaluate maps at each, and plot values by update.

    Parameters
    ----------
    model
        Hub name, or a folder of checkpoints; by default one is trained.
    revisions
        Checkpoints of --model, such as step0,step512,step143000 of Pythia.
    updates
        Updates of 32 sentences that a model is trained.
    layers
        Layers of the model to train: 2, 4 or 8.
    pieces
        Pieces of its vocabulary.
    windows
        Windows of 64 tokens to fit maps of parts on.
    eval_windows
        Others that maps of parts are tested on.
    """
    if (model is None) != (revisions is None):
        raise InputError("--model and --revisions must be given together.")
    sizes = SENTENCES | {"windows": windows, "eval_windows": eval_windows}
    job = {**sizes, "seed": study.seed, "corpora": [part.fingerprint for part in study.parts]}
    taken: dict[str, float] = {}
    if model is None or revisions is None:
        model, steps = f"small-gpt-{layers}-checkpoints", checkpoint_updates(updates)
        folder = report.out / model
        job |= {"layers": layers, "pieces": pieces, "updates": updates}
        save = partial(save_checkpoint, folder, steps)
        *_, run = train_gpt(study, folder, layers=layers, pieces=pieces, updates=updates, save=save)
        taken["training"] = run.seconds
    else:
        folder, steps = Path(model), checkpoint_steps(revisions)
    job |= {"model": model, "checkpoints": steps}
    place = report.out / NAME / slug(model)
    with Cells.stored(place, "linearity over training", job) as cells:
        results = {
            name: cells.get(name, partial(evaluate_checkpoint, study, folder, name, sizes))
            for name in Bar(steps, desc="checkpoints", unit="checkpoint")
        }
    taken["evaluation"] = sum(cells.seconds.values())
    origin = job | {
        "seconds": taken, SECONDS: sum(taken.values()),
        "fingerprints": {name: result["fingerprint"] for name, result in results.items()},
    }  # fmt: skip
    tables = {name: pd.read_csv(io.StringIO(result["table"])) for name, result in results.items()}
    table = joined([part.assign(model=model, step=steps[name]) for name, part in tables.items()])
    report.write(NAME, table, origin, over_training(table))


def checkpoint_updates(updates: int) -> dict[str, int]:
    """0 and 11 updates, each half of the next and the last all of them, by the name of their checkpoint."""
    return {f"step{update}": update for update in sorted({0, *(updates >> i for i in range(11))})}


def checkpoint_steps(revisions: str) -> dict[str, int]:
    """Updates by revision, in their order: the number that its name ends with."""
    steps = {}
    for name in map(str.strip, revisions.split(",")):
        number = re.search(r"\d+$", name)
        if number is None:
            raise InputError(f"revisions must end with their update, such as step512, got {name!r}.")
        steps[name] = int(number[0])
    return dict(sorted(steps.items(), key=lambda item: item[1]))


def save_checkpoint(folder: Path, steps: Mapping[str, int], model: Any, tokenizer: Any, update: int) -> None:
    """Save a model at some updates, in a folder for each."""
    path, partial = folder / f"step{update}", folder / "partial"
    if path.name in steps:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(path, ignore_errors=True)  # of a run that was interrupted, or of another
        partial.rename(path)


def load_checkpoint(model: Path, revision: str) -> Any:
    """A folder in the folder of the model, or a revision on the hub."""
    folder = model / revision
    return matlens.load(folder) if folder.is_dir() else matlens.load(model.as_posix(), revision=revision)


def evaluate_checkpoint(study: Study, folder: Path, name: str, sizes: dict[str, int]) -> dict[str, str]:
    """The table of a checkpoint as text, and its fingerprint."""
    loaded = load_checkpoint(folder, name)
    table = checkpoint_table(study, loaded, **sizes)
    return {"table": csv_text(table), "fingerprint": ModelIdentity.from_model(loaded).fingerprint}


def checkpoint_table(
    study: Study, model: Any, *, fit_sentences: int, sentences: int, windows: int, eval_windows: int
) -> pd.DataFrame:
    """All values of one checkpoint, with maps fitted on the first part of the study's sentences."""
    texts = AtlasText(WINDOW, windows, eval_windows).examples(model, study)
    atlas = linearity_atlas(model, *texts, jumps=(), progress=False)
    atlas = atlas[atlas["kind"].isin(KINDS) & atlas["metric"].isin(SCORES)]
    examples = [
        make_examples(model, part, seed=study.seed).head(n)
        for part, n in zip(study.parts, (fit_sentences, sentences), strict=True)
    ]
    training, validation = (collect(model, each, progress=False) for each in examples)
    maps = MapSet.fit(training, pairs="last", progress=False)
    read = prediction_quality(Readout(model), maps, validation, progress=False)
    read = read[(read["layer"] < read["target"]) & ((read["k"] == 1) | (read["metric"] == "surprisal"))]
    perplexity = text_losses(model, examples[1], progress=False).perplexity()
    value, low, high = (float(np.log(each)) for each in perplexity[:3])
    loss = Estimate(value, low, high, perplexity.n)
    rows = [
        result_row(
            NAME, model="", corpus=study.parts[1].name, method=method, layer=None, target=None, metric=metric,
            k=k, estimate=estimate,
        )
        for method, metric, k, estimate in (
            ("constant", "precision", 1, most_frequent(Readout(model), validation)),
            ("model", "loss", None, loss),
        )
    ]  # fmt: skip
    return joined([atlas, read, result_table(rows)]).assign(experiment=NAME)


def joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """The rows of all tables."""
    rows: list[Any] = [row for table in tables for row in table.to_dict("records")]
    return result_table(rows, *COLUMNS)


def most_frequent(readout: Readout, data: Activations) -> Estimate:
    """The share of the model's predictions that are its most frequent one."""
    predicted = readout.top_ids(data[data.provenance.identity.n_layers])
    return metrics.proportion(predicted == predicted.mode().values)


if __name__ == "__main__":
    run_study(main, model=None)
