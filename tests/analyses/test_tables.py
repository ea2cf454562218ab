"""The table of a training holds its curve and its perplexities, each number where it belongs."""

from __future__ import annotations

from typing import Any

from figures.paper_a import training_curves
from training.running import TrainingRun
from training.tables import NgramModel, training_table

from matlens.metrics import Estimate

SEQUENCES = [[2, 5, 6, 2], [2, 5, 7, 6, 2], [2, 8, 2]]
HELD_OUT = [[2, 5, 6, 7, 2], [2, 8, 5]]
NAMED: dict[str, Any] = {"model": "small", "corpus": "words", "n_held_out": 2}


def test_a_table_holds_the_curve_and_the_perplexities():
    run = TrainingRun(20, 3.0, [(10, 2.5, 2.75), (20, 2.0, 2.25)])
    perplexities = {"trigrams": NgramModel(SEQUENCES, d_vocab=9).perplexity(HELD_OUT)}
    estimates = {name: Estimate.without_interval(*number) for name, number in perplexities.items()}
    table = training_table(run, estimates, **NAMED)
    losses = table[table["metric"] == "loss"]
    assert losses[["method", "k", "value"]].values.tolist() == [
        ["training", 10, 2.5], ["held-out", 10, 2.75], ["training", 20, 2.0], ["held-out", 20, 2.25],
    ]  # fmt: skip
    (row,) = table[table["metric"] == "perplexity"].to_dict("records")
    assert (row["method"], row["value"], row["n"]) == ("trigrams", *perplexities["trigrams"])
    figure = training_curves(table)
    drawn = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].get_lines()}
    assert drawn == {
        "small, training": [[10, 2.5], [20, 2.0]], "small, held-out": [[10, 2.75], [20, 2.25]],
    }  # fmt: skip
