"""Paper A, Figures 2 and 3: r2 of ``mat`` and ``id`` for every pair of layers.

Expect ``mat`` to be bluer than ``id`` nearly everywhere, most of all far from the diagonal, given several
times more training sentences than ``d_model``; with fewer, least squares follows the noise and ``mat`` can
be worse than the mean. Figure 2 is ``--model gpt2-xl``, Figure 3 ``--model bert-large-uncased``, both with
9,000 and 3,000 sentences of Wikipedia.
"""

from __future__ import annotations

from studies import Report, Study, run_study

from matlens import plots
from matlens.lens import fit_quality

NAME = "paper_a_fig2_r2"


def main(study: Study, report: Report) -> None:
    """Fit all maps between layers, write their r2 as a table and draw both heatmaps."""
    table = fit_quality(study.maps, study.validation)
    report.write(NAME, table, study.origin, plots.plot_r2(table))


if __name__ == "__main__":
    run_study(main)
