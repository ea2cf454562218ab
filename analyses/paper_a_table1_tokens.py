"""Paper A, Table 1: top five tokens of layers by ``mat`` and ``id``.

For a masked-LM model give sentences with one ``[MASK]``, for a decoder the beginning of a sentence. Expect
tokens that fit far earlier under ``mat``, and unrelated word pieces under ``id`` in the first half. The
paper's table is ``--model bert-large-uncased``, layers 4, 12 and 24.
"""

from __future__ import annotations

from figures.paper_a import token_table
from paper_a.predictions import predictions_side_by_side, top_predictions
from studies import Report, Study, run_study, show

from matlens import collect, make_prompts
from matlens.models import ModelLayout

NAME = "paper_a_table1_tokens"
MASKED = (
    "aldrige had shoulder surgery in {}.",
    "on your next view you will be asked to {} continue reading.",
)
NEXT = ("The Eiffel Tower stands in the city of", "She opened the window because the room was too")


def main(
    study: Study, report: Report, prompt: list[str] | None = None, layer: list[int] | None = None
) -> None:
    """Print and plot the top tokens of each prompt side by side.

    Parameters
    ----------
    prompt
        A prompt (repeatable).
    layer
        A layer (repeatable).
    """
    mask = study.readout.tokenizer.mask_token
    given = prompt or (
        [text.format(mask) for text in MASKED]
        if study.model.cfg.attention_dir == "bidirectional"
        else list(NEXT)
    )
    read = collect(study.model, make_prompts(study.model, list(dict.fromkeys(given))))
    default = [study.n_layers // 6, study.n_layers // 2, study.n_layers]
    layers = [ModelLayout.from_model(study.model).resolve(number).layer for number in layer or default]
    table = top_predictions(study.readout, study.maps, read, layers)
    tables = predictions_side_by_side(table)
    for text, tokens in tables.items():
        show(f"Input: {text}", tokens)
    report.write(NAME, table, study.origin, token_table(tables))


if __name__ == "__main__":
    run_study(main)
