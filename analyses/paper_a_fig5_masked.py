"""Paper A, Figure 5: what each layer of a masked-LM model already predicts for a masked token.

The token at the drawn position is masked before the model runs, and the read-out is its whole masked-LM
head. Expect ``id`` near zero in the first half and ``mat`` far above it. The paper's figure is
``--model bert-large-uncased`` with 9,000 and 3,000 sentences of Wikipedia.
"""

from __future__ import annotations

from pathlib import Path

from matlens import InputError, options, plots, prediction_quality, workflow
from matlens.cli import run_script
from matlens.examples import is_masked
from matlens.study import Study

NAME = "paper_a_fig5_masked"


def main(
    model: options.Model = "bert-base-uncased",
    corpus: options.CorpusName = "wikipedia-sample",
    train: options.Train = 9000,
    val: options.Val = 3000,
    seed: options.Seed = 0,
    device: options.Device = None,
    out: options.Out = Path("out"),
) -> None:
    """Fit the maps on masked tokens, write prediction quality as a table and draw it over the layers."""
    study = Study.of(model, corpus, out, n_train=train, n_validation=val, seed=seed, device=device)
    if not is_masked(study.model):
        raise InputError(
            f"{model} is a decoder and predicts the next token, not a masked one. Expected a masked-LM model "
            "such as bert-base-uncased; paper_a_fig4_next_token.py is for decoders."
        )
    table = prediction_quality(study.readout, study.maps, study.validation)
    workflow.write_results(out, NAME, table, study.origin)
    for path in plots.save(plots.prediction(table), out, NAME):
        print(path)


if __name__ == "__main__":
    run_script(main)
