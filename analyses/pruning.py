"""Blocks left out of a model: methods and ways of choosing, on the corpus of calibration and on another.

3, 6 and 9 blocks are left out. The published way is ReplaceMe on the one span that turns the stream least;
next to it stand leaving out alone, scaled channels, and refitting the output matrix of the FFN before each
span, with spans that are most linear or cost the calibration text least, and with blocks taken away one after
the other. Every map is fitted on windows of the first corpus alone. Time and memory are those of a token,
written with the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import pandas as pd
import typer
from pruning_methods import added_perplexity, pruning_table
from rich.console import Console
from rich.table import Table
from studies import Report, Study, run_study

from matlens.data import Corpus, make_windows
from matlens.pruning import Choice, Method

NAME = "pruning"
SIZES = (3, 6, 9)


def main(
    studies: Iterator[Study],
    report: Report,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 256,
    windows: Annotated[int, typer.Option(min=1, help="Windows that maps are fitted on.")] = 120,
    judged: Annotated[
        int, typer.Option(min=2, help="Windows of each corpus that models are judged on.")
    ] = 12,
    heal: Annotated[int, typer.Option(min=0, help="Tokens that the best is healed on; 0 for none.")] = 0,
    method: Annotated[list[Method] | None, typer.Option(help="Only these methods.")] = None,
    choice: Annotated[list[Choice] | None, typer.Option(help="Only these ways of choosing.")] = None,
    size: Annotated[
        list[int] | None, typer.Option(help="How many blocks; by default 3, 6 and 9 where there are so many.")
    ] = None,
) -> None:
    """Leave blocks out in every way, and print how much of what ReplaceMe adds to the perplexity is gone."""
    several = list(studies)
    model = several[0].model
    texts: dict[str, Corpus] = {study.parts[1].name: study.parts[1] for study in several}
    table = pruning_table(
        model,
        make_windows(model, several[0].parts[0], size=window, max_windows=windows),
        {
            name: make_windows(model, text, size=window, max_windows=judged, name=name)
            for name, text in texts.items()
        },
        size or [n for n in SIZES if n < model.cfg.n_layers] or [1],
        methods=method or tuple(Method),
        choices=choice or tuple(Choice),
        heal=heal,
    )
    sizes_of_texts = {"windows": windows, "window": window, "judged": judged, "heal": heal}
    report.write(NAME, table, several[0].origin_of_weights | sizes_of_texts)
    show(added_perplexity(table))


def show(gone: pd.DataFrame) -> None:
    """Print perplexities and what is gone of what the published method adds."""
    printed = Table("corpus", "left out", "choice", "method", "blocks", "perplexity", "gone")
    for row in gone.sort_values(["corpus", "n_left_out", "perplexity"]).to_dict("records"):
        numbers = (f"{row['perplexity']:.1f}", f"{row['gone']:.0%} ({row['low']:.0%} to {row['high']:.0%})")
        printed.add_row(
            row["corpus"], str(row["n_left_out"]), row["choice"], row["method"], row["blocks"], *numbers
        )
    Console().print(printed)


if __name__ == "__main__":
    run_study(main, corpus=["wikipedia-sample", "news-sample"], train=4000, val=600, figures=False)
