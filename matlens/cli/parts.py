"""Commands for parts of a model: linearity and pruning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from matlens.cli.options import CorpusOptions, ModelOptions, command, parsed
from matlens.cli.printing import number_text, print_atlas, print_figures, print_frame, print_line
from matlens.cli.starting import on_main
from matlens.errors import Between, InputError, NonNegative, NonNegativeInt, PositiveInt, Seed

_UNITS = {"seconds": (1, "s per token"), "cache": (1e3, "kB per token"), "weights": (1e6, "MB")}

app = typer.Typer()
Method = Literal["out", "magnitude", "replaceme", "refit", "chain"]
Choice = Literal["angle", "r2", "loss", "greedy"]
TwoOrMore = Annotated[int, Between(2)]


def _read_blocks(text: str) -> int | list[int]:
    indices = [int(part) for part in text.removesuffix(",").split(",")]
    return indices if "," in text else indices[0]


Blocks = Annotated[
    Any, parsed(_read_blocks, "BLOCKS", "a number of blocks, or a list such as 13,14,15 (one block: 13,)")
]


@command(app)
def linearity(
    model: ModelOptions,
    corpus: CorpusOptions,
    window: TwoOrMore = 64,
    windows: TwoOrMore = 80,
    eval_windows: TwoOrMore = 4,
    every: PositiveInt = 2,
    seed: Seed = 0,
    out: Path = Path("out"),
) -> None:
    """Measure how linear every part of a model is, and the loss when a map replaces it.

    Nine tenths of the corpus are for fitting, the rest for evaluation. An interrupted run resumes. A thorough
    run: '--every 1 --windows 160 --eval-windows 8', four times as long.

    Parameters
    ----------
    window
        Tokens per window, or maximum tokens per sentence.
    windows
        Maximum windows or sentences for fitting.
    eval_windows
        Maximum windows or sentences for evaluation.
    every
        Use every n-th block; 1 for all.
    """
    parts = corpus.tenth(seed)
    from matlens import plots
    from matlens.data.making import make_windows
    from matlens.io.files import check_writable
    from matlens.io.tables import write_results
    from matlens.linearity.atlas import ATLAS, atlas_seconds, linearity_atlas
    from matlens.linearity.ranking import CORRELATIONS, rank_correlations
    from matlens.models.identity import ModelIdentity

    check_writable(out)
    bridge = model.load()
    fitted_on, evaluated_on = (
        make_windows(bridge, part, size=window, max_windows=most, targets=True, seed=seed)
        for part, most in zip(parts, (windows, eval_windows), strict=True)
    )
    table = linearity_atlas(bridge, fitted_on, evaluated_on, folder=out / "atlas", every=every)
    with on_main("tables of the atlas") as is_main:
        if not is_main:
            return
        correlations = rank_correlations(table, seed=seed)
        origin = {
            "model": ModelIdentity.from_model(bridge).to_json(), "seed": seed, "window": window,
            "every": every, "n_fitted": len(fitted_on.tokens),
            "n_evaluated": len(evaluated_on.targets), "atlas_seconds": atlas_seconds(out / "atlas"),
        }  # fmt: skip
        for name, written in ((ATLAS, table), (CORRELATIONS, correlations)):
            write_results(out, name, written, origin)
            print_line(out / f"{name}.csv")
        print_figures(plots.save(plots.plot_atlas(table, correlations), out / ATLAS))
        print_atlas(table, correlations)


@command(app)
def prune(
    model: ModelOptions,
    corpus: CorpusOptions,
    out: Path,
    blocks: Blocks = None,
    attention: Blocks = None,
    method: Method | None = None,
    choice: Choice = "greedy",
    penalty: NonNegative | None = None,
    heal: NonNegativeInt = 0,
    window: TwoOrMore = 256,
    windows: PositiveInt = 40,
    eval_windows: TwoOrMore = 20,
) -> None:
    """Remove blocks, fold maps into the weights before them, and save a plain model.

    Nine tenths of the corpus are for calibration, the rest for evaluation. A thorough run has '--windows 160
    --eval-windows 40'. It takes three times as long, and perplexity increases less: by 6% instead of 8% for
    SmolLM2-135M without 3 blocks.

    Parameters
    ----------
    blocks
        Number of blocks to remove, or a list: 13,14,15.
    attention
        Remove only attention: number of blocks, or a list of blocks.
    method
        How the FFN's output matrix before each span is replaced; default chain (refit with --attention).
    choice
        How blocks are chosen if only their number is given; greedy is lazy greedy, one at a time.
    penalty
        Penalty towards the original matrix; by default 0.1 for refit, 0.3 for chain.
    heal
        Train the changed matrices on this many tokens; minutes for 100,000.
    window
        Tokens per window of running text.
    windows
        Maximum windows for calibration.
    eval_windows
        Maximum windows for evaluation of both models.
    """
    if (blocks is None) == (attention is None) or (attention is not None and heal):
        raise InputError("Give either --blocks or --attention, and --heal with --blocks only.")
    options: dict[str, Any] = {"penalty": penalty} | ({} if method is None else {"method": method})
    from matlens.pruning.saving import check_new, save_pruned

    check_new(out)  # before the work
    fitted_on, evaluated_on = corpus.tenth()
    import pandas as pd

    from matlens.data.making import make_windows
    from matlens.pruning.evaluation import compare_costs, compare_pruned, evaluation_tokens
    from matlens.pruning.pruned import prune as prune_model
    from matlens.pruning.pruned import prune_attention

    bridge = model.load()
    calibration = make_windows(bridge, fitted_on, size=window, max_windows=windows)
    validation = make_windows(bridge, evaluated_on, size=window, max_windows=eval_windows)
    evaluation_tokens(validation)  # refused before the work
    if attention is None:
        pruned = prune_model(bridge, calibration, blocks, choice=choice, heal=heal, **options)
    else:
        pruned = prune_attention(bridge, calibration, attention, **options)
    table = pd.concat([compare_pruned(bridge, pruned, validation), compare_costs(bridge, pruned)])
    save_pruned(pruned, out, table)
    units = [_UNITS.get(metric, (1, "")) for metric in table["metric"]]
    table["value"] /= [divisor for divisor, _ in units]
    table["unit"] = [unit for _, unit in units]
    print_frame(
        "Perplexity and agreement on held-out text; time and memory of generation",
        table[["method", "metric", "value", "unit", "low", "high"]],
    )
    if healed := pruned.provenance.details.get("healed"):
        print_line(
            f"Healed on {healed['n_tokens']:,} tokens in {healed['seconds']:,.0f} seconds: "
            f"{number_text(healed['divergence'])} nats a token from the original model."
        )
    removed = pruned.blocks if attention is None else pruned.attention
    what = "blocks" if attention is None else "attention of the blocks"
    print_line(f"Without the {what} {', '.join(map(str, removed)) or 'none'}: {out}")
