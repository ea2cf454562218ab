"""The command that leaves blocks out of a model and writes a plain Hugging Face folder of the rest."""

from __future__ import annotations

from typing import Annotated

import typer

from matlens.arguments import require_number
from matlens.cli.groups import CorpusOptions, ModelOptions, grouped
from matlens.cli.options import Out
from matlens.cli.printing import print_line, print_table
from matlens.errors import InputError
from matlens.pruning.choices import Choice, Method
from matlens.storage.numbers import number_text


@grouped
def prune(
    model: ModelOptions,
    corpus: CorpusOptions,
    out: Out,
    blocks: Annotated[
        str,
        typer.Option(
            "--blocks", help="How many blocks to leave out, or which: 13,14,15.", show_default=False
        ),
    ],
    method: Annotated[
        Method, typer.Option(help="What becomes of the FFN's output matrix before each span.")
    ] = Method.refit,
    choice: Annotated[
        Choice, typer.Option(help="How blocks are chosen where only their number is given.")
    ] = Choice.greedy,
    penalty: Annotated[
        float | None,
        typer.Option(
            min=0, help="How much it is held near what it was.", show_default="0.1 for refit, else 0"
        ),
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window of running text.")] = 256,
    windows: Annotated[int, typer.Option(min=1, help="Most windows to calibrate on.")] = 160,
    judged: Annotated[int, typer.Option(min=2, help="Most windows to judge both models on.")] = 40,
) -> None:
    """Leave blocks out, fold a map into the weights before them, and write a plain Hugging Face folder.

    Nine tenths of the corpus are for calibration, the rest to judge on.
    """
    wanted = _blocks(blocks)
    if penalty is not None:
        require_number(penalty, "--penalty", least=0)
    from matlens.pruning.saving import reserved, save_pruned

    with reserved(out):  # before the work, as the only one that does it
        model.check()
        sentences = corpus.load()
        print(sentences.report())
        n_judged = max(1, len(sentences) // 10)
        fitted_on, judged_on = sentences.split(n_train=len(sentences) - n_judged, n_validation=n_judged)
        from matlens.corpora.prompts import make_windows
        from matlens.pruning.evaluation import compare_pruned, speed
        from matlens.pruning.layouts import plain_copy
        from matlens.pruning.pruned import prune as prune_model

        bridge = model.load()
        pruned = prune_model(
            bridge, make_windows(bridge, fitted_on, size=window, most=windows), wanted,
            method=method, choice=choice, penalty=penalty,
        )  # fmt: skip
        table = compare_pruned(bridge, pruned, make_windows(bridge, judged_on, size=window, most=judged))
        save_pruned(pruned, out, table)
    rows = [
        (
            row["method"],
            row["metric"],
            number_text(row["value"]),
            f"{number_text(row['low'])} to {number_text(row['high'])}",
        )
        for row in table.to_dict("records")
    ]
    print_table("Judged on other text", ("model", "measure", "value", "95% interval"), rows)
    costs = []
    for name, each in (("whole", plain_copy(bridge)), ("pruned", pruned.model)):
        cost = speed(each)
        numbers = (1000 * cost.seconds, cost.weights / 1e6, cost.cache / 1e3)
        costs.append((name, *map(number_text, numbers)))
    heads = ("model", "ms a token", "MB of weights", "KB of cache a token")
    print_table("Writing tokens one by one", heads, costs)
    print_line(f"Without the blocks {', '.join(map(str, pruned.blocks)) or 'none'}: {out}")


def _blocks(text: str) -> int | list[int]:
    try:
        numbers = [int(part) for part in text.removesuffix(",").split(",")]
    except ValueError:
        raise InputError(
            f"--blocks {text[:40]!r}: expected how many, or their numbers with a comma behind each, "
            "such as 13,14,15 (one block alone: 13,)."
        ) from None
    return numbers[0] if "," not in text else numbers
