"""Paper A, Figure 4: what each layer already predicts, by Precision@1, 5, 10 and surprisal.

Expect ``mat`` above ``id`` in precision and below it in surprisal at every layer but the last ones, where
the two meet. The paper's figure is ``--model gpt2-xl`` with 9,000 and 3,000 sentences of Wikipedia.
"""

from __future__ import annotations

from pathlib import Path

from matlens import InputError, options, plots, prediction_quality, workflow
from matlens.cli import run_script
from matlens.examples import is_masked
from matlens.study import Study

NAME = "paper_a_fig4_next_token"


def main(
    model: options.Model = "smollm2-135m",
    corpus: options.CorpusName = "wikipedia-sample",
    train: options.Train = 9000,
    val: options.Val = 3000,
    seed: options.Seed = 0,
    device: options.Device = None,
    out: options.Out = Path("out"),
) -> None:
    """Fit the maps, write prediction quality as a table and draw it over the layers."""
    study = Study.of(model, corpus, out, n_train=train, n_validation=val, seed=seed, device=device)
    if is_masked(study.model):
        raise InputError(f"{model} predicts masked tokens, not the next one: see paper_a_fig5_masked.py.")
    table = prediction_quality(study.readout, study.maps, study.validation)
    workflow.write_results(out, NAME, table, study.origin)
    for path in plots.save(plots.prediction(table), out, NAME):
        print(path)


if __name__ == "__main__":
    run_script(main)
