"""Paper A, Figures 2 and 3: r2 of ``mat`` and ``id`` for every pair of layers.

Expect ``mat`` to be bluer than ``id`` nearly everywhere, most of all far from the diagonal, given several
times more training sentences than ``d_model``; with fewer, least squares follows the noise and ``mat`` can
be worse than the mean. Figure 2 is ``--model gpt2-xl``, Figure 3 ``--model bert-large-uncased``, both with
9,000 and 3,000 sentences of Wikipedia.
"""

from __future__ import annotations

from pathlib import Path

from matlens import fit_quality, options, plots, workflow
from matlens.cli import run_script
from matlens.study import Study

NAME = "paper_a_fig2_r2"


def main(
    model: options.Model = "smollm2-135m",
    corpus: options.CorpusName = "wikipedia-sample",
    train: options.Train = 9000,
    val: options.Val = 3000,
    seed: options.Seed = 0,
    device: options.Device = None,
    out: options.Out = Path("out"),
) -> None:
    """Fit all maps between layers, write their r2 as a table and draw both heatmaps."""
    study = Study.of(model, corpus, out, n_train=train, n_validation=val, seed=seed, device=device)
    table = fit_quality(study.maps, study.validation)
    workflow.write_results(out, NAME, table, study.origin)
    for path in plots.save(plots.r2_heatmaps(table), out, NAME):
        print(path)


if __name__ == "__main__":
    run_script(main)
