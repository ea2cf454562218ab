"""Paper A, Figures 7 and 8: several models on one axis of relative depth.

Give ``--model`` once for each; all must predict the same kind of token. Expect the same shape at every
size, and curves of one family of decoders that nearly lie on each other. Figure 7 is gpt2, gpt2-medium,
gpt2-large and gpt2-xl, Figure 8 bert-base-uncased and bert-large-uncased.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from figures.paper_a import relative_depth
from studies import Report, Study, run_study

from matlens import InputError
from matlens.lens import prediction_quality

NAME = "paper_a_fig7_models"


def main(studies: Iterator[Study], report: Report) -> None:
    """Evaluate every model on the same sentences and draw all in one figure."""
    tables, origins, kinds = [], {}, set()
    for study in studies:
        kinds.add(study.model.cfg.attention_dir == "bidirectional")
        if len(kinds) > 1:
            raise InputError(
                "--model must be all decoders or all masked-LM models, whose metrics compare, got both (at "
                f"{study.model.cfg.model_name})."
            )
        tables.append(prediction_quality(study.readout, study.maps, study.validation))
        origins[study.folder.name] = study.origin
    table = pd.concat(tables, ignore_index=True)
    report.write(NAME, table, {"studies": origins}, relative_depth(table))


if __name__ == "__main__":
    run_study(main, model=["smollm2-135m"])
