"""Paper A, Table 1: the five tokens that layers predict most, read through ``mat`` and as they are.

For a masked-LM model give sentences with one ``[MASK]``, for a decoder the beginning of a sentence. Expect
tokens that fit far earlier under ``mat``, and unrelated word pieces under ``id`` in the first half. The
paper's table is ``--model bert-large-uncased``, layers 4, 12 and 24.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from matlens import anatomy, collect, make_prompts, options, plots, workflow
from matlens.cli import run_script
from matlens.examples import is_masked
from matlens.study import Study
from matlens.tokens import printed, side_by_side, texts, top_predictions

NAME = "paper_a_table1_tokens"
MASKED = (
    "aldrige had shoulder surgery in {}.",
    "on your next view you will be asked to {} continue reading.",
)
NEXT = ("The Eiffel Tower stands in the city of", "She opened the window because the room was too")


def main(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; give it once for each.")] = None,
    layer: Annotated[list[int] | None, typer.Option(help="A layer; give it once for each.")] = None,
    model: options.Model = "smollm2-135m",
    corpus: options.CorpusName = "wikipedia-sample",
    train: options.Train = 9000,
    val: options.Val = 3000,
    seed: options.Seed = 0,
    device: options.Device = None,
    out: options.Out = Path("out"),
) -> None:
    """Print the tokens of each prompt side by side, and draw them as a figure."""
    study = Study.of(model, corpus, out, n_train=train, n_validation=val, seed=seed, device=device)
    mask = study.readout.tokenizer.mask_token
    given = prompt or ([text.format(mask) for text in MASKED] if is_masked(study.model) else list(NEXT))
    read = collect(study.model, make_prompts(study.model, list(dict.fromkeys(given))))
    default = [study.n_layers // 6, study.n_layers // 2, study.n_layers]
    layers = [anatomy(study.model).resolve(one).layer for one in layer or default]
    table = top_predictions(study.readout, study.maps, read, layers)
    workflow.write_results(out, NAME, table, study.origin)
    for text in texts(study.readout, read):
        Console().print(printed(table, text))
    tables = {text: side_by_side(table, text) for text in texts(study.readout, read)}
    for path in plots.save(plots.token_table(tables), out, NAME):
        print(path)


if __name__ == "__main__":
    run_script(main)
