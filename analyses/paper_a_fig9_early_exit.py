"""Paper A, Figure 9: leaving the model as soon as a layer is confident.

Precision@1 against the mean number of layers run, for ``mat`` and ``id``, with early and with fixed exit.
Expect early above fixed exit and ``mat`` above ``id``. At 95% the paper saves 3.3 of 24 layers of GPT-2
with ``mat`` and 1.4 with ``id`` (``--model gpt2-medium``), and 4.8 and 3.5 of BERT
(``--model bert-large-uncased``).
"""

from __future__ import annotations

from matlens import plots
from matlens.cli import Report, run_study
from matlens.lens import exit_sweep, layers_saved
from matlens.study import Study

NAME = "paper_a_fig9_early_exit"


def main(study: Study, report: Report) -> None:
    """Sweep the threshold, print the layers saved at a precision of 95% and draw the curves."""
    table = exit_sweep(study.readout, study.maps, study.validation)
    for method in ("mat", "id"):
        saved = layers_saved(table, method)
        print(f"{method}: {saved:.2f} of {study.n_layers} layers saved at 95% ({saved / study.n_layers:.1%})")
    report.write(NAME, table, study.origin, plots.early_exit(table))


if __name__ == "__main__":
    run_study(main)
