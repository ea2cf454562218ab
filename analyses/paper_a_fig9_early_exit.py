"""Paper A, Figure 9: early exit at the first confident layer.

Precision@1 against the mean number of layers run, for ``mat`` and ``id``, with early and with fixed exit.
Expect early above fixed exit and ``mat`` above ``id``. At 95% the paper saves 3.3 of 24 layers of GPT-2
with ``mat`` and 1.4 with ``id`` (``--model gpt2-medium``), and 4.8 and 3.5 of BERT
(``--model bert-large-uncased``).
"""

from __future__ import annotations

from figures.paper_a import early_exit
from memory_and_layers import PAPER_SWEEP
from studies import Report, Study, run_study

from matlens import Lens
from matlens.lens import exit_sweep, savings

NAME = "paper_a_fig9_early_exit"


def main(study: Study, report: Report) -> None:
    """Sweep the threshold, print the layers saved at a precision of 95%, and plot."""
    lenses = {"mat": Lens.from_maps(study.maps, model=study.model), "id": Lens.identity(study.model)}
    table = exit_sweep(lenses, study.validation, lams={"mat": PAPER_SWEEP})
    for row in savings(table).to_dict("records"):
        amount = f"{row['saved']:.2f} of {row['n_layers']} layers saved at 95% ({row['share']:.1%})"
        print(f"{row['method']}: {amount}")
    report.write(NAME, table, study.origin, early_exit(table))


if __name__ == "__main__":
    run_study(main)
