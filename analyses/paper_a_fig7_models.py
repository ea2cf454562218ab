"""Paper A, Figures 7 and 8: several models on one axis of relative depth.

Give ``--model`` once for each; all must predict the same kind of token. Expect the same shape at every
size, and curves of one family of decoders that nearly lie on each other. Figure 7 is gpt2, gpt2-medium,
gpt2-large and gpt2-xl, Figure 8 bert-base-uncased and bert-large-uncased.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from matlens import InputError, plots
from matlens.cli import options, report, run_script
from matlens.corpora import is_masked
from matlens.lens import prediction_quality
from matlens.study import Study

NAME = "paper_a_fig7_models"


def main(
    model: options.Models = ["smollm2-135m"],  # noqa: B006
    corpus: options.CorpusName = "wikipedia-sample",
    train: options.Train = 9000,
    val: options.Val = 3000,
    seed: options.Seed = 0,
    device: options.Device = None,
    out: options.Out = Path("out"),
) -> None:
    """Evaluate every model on the same sentences and draw all in one figure."""
    tables, origins, kinds = [], {}, set()
    for name in dict.fromkeys(model):
        study = Study.load(name, corpus, out, n_train=train, n_validation=val, seed=seed, device=device)
        kinds.add(is_masked(study.model))
        if len(kinds) > 1:
            raise InputError(
                f"{name} predicts masked tokens and the models before it do not, or the other way round: "
                "their numbers do not compare. Expected models of one kind."
            )
        tables.append(prediction_quality(study.readout, study.maps, study.validation))
        origins[study.folder.name] = study.origin
    table = pd.concat(tables, ignore_index=True)
    report(out, NAME, table, {"studies": origins}, plots.relative_depth(table))


if __name__ == "__main__":
    run_script(main)
