"""Paper A, Figure 5: predictions of each layer of a masked-LM model.

The token at the sampled position is masked before the model runs, and the readout is its whole masked-LM
head. Expect ``id`` near zero in the first half and ``mat`` far above it. The paper's figure is
``--model bert-large-uncased`` with 9,000 and 3,000 sentences of Wikipedia.
"""

from __future__ import annotations

from paper_a.predictions import write_quality
from studies import Report, Study, run_study

from matlens import InputError

NAME = "paper_a_fig5_masked"


def main(study: Study, report: Report) -> None:
    """Fit maps on masked tokens, and plot prediction quality by layer."""
    if study.model.cfg.attention_dir != "bidirectional":
        raise InputError(
            f"model must be a masked LM such as bert-base-uncased, got {study.model.cfg.model_name}. Use "
            "paper_a_fig4_next_token.py for decoders."
        )
    write_quality(study, report, NAME)


if __name__ == "__main__":
    run_study(main, model="bert-base-uncased")
