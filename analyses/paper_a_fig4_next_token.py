"""Paper A, Figure 4: what each layer already predicts, by Precision@1, 5, 10 and surprisal.

Expect ``mat`` above ``id`` in precision and below it in surprisal at every layer but the last ones, where
the two meet. The paper's figure is ``--model gpt2-xl`` with 9,000 and 3,000 sentences of Wikipedia.
"""

from __future__ import annotations

from paper_a.predictions import write_quality
from studies import Report, Study, run_study

from matlens import InputError

NAME = "paper_a_fig4_next_token"


def main(study: Study, report: Report) -> None:
    """Fit the maps, write prediction quality as a table and draw it over the layers."""
    if study.model.cfg.attention_dir == "bidirectional":
        raise InputError(
            f"model must be a decoder, got {study.model.cfg.model_name}. Use "
            "paper_a_fig5_masked.py for masked-LM models."
        )
    write_quality(study, report, NAME)


if __name__ == "__main__":
    run_study(main)
