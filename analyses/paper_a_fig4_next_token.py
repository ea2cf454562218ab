"""Paper A, Figure 4: what each layer already predicts, by Precision@1, 5, 10 and surprisal.

Expect ``mat`` above ``id`` in precision and below it in surprisal at every layer but the last ones, where
the two meet. The paper's figure is ``--model gpt2-xl`` with 9,000 and 3,000 sentences of Wikipedia.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matlens import Readout, load, load_corpus, plots, prediction_quality, workflow

NAME = "paper_a_fig4_next_token"


def main(
    model: Annotated[str, typer.Option(help="As in 'matlens run'.")] = "smollm2-135m",
    corpus: Annotated[str, typer.Option(help="As in 'matlens run'.")] = "wikipedia-sample",
    train: Annotated[int, typer.Option(min=1, help="Sentences to fit on.")] = 9000,
    val: Annotated[int, typer.Option(min=2, help="Sentences to evaluate on.")] = 3000,
    seed: Annotated[int, typer.Option(help="Of split and positions.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps.")] = None,
    out: Annotated[Path, typer.Option(help="Folder; shared with the other analyses.")] = Path("out"),
) -> None:
    """Fit the maps, write prediction quality as a table and draw it over the layers."""
    loaded = load(model, device=device)
    _, validation = workflow.collect_parts(
        loaded, load_corpus(corpus), out, n_train=train, n_validation=val, seed=seed
    )
    maps, readout = workflow.fit_maps(out), Readout(loaded)
    table = prediction_quality(readout, maps, validation)
    workflow.write_results(out, NAME, table, maps, validation, unembed_hash=readout.unembed_hash)
    for path in plots.save(plots.prediction(table), out, NAME):
        print(path)


if __name__ == "__main__":
    typer.run(main)
