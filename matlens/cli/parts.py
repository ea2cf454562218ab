"""Commands about parts of a model: how linear each is, and a plain model without some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from matlens.cli.options import CorpusOptions, ModelOptions, command
from matlens.cli.printing import print_atlas, print_expected, print_figures, print_frame, print_line
from matlens.cli.starting import on_main
from matlens.errors import Between, InputError, NonNegative, NonNegativeInt, PositiveInt, Seed
from matlens.io.numbers import number_text
from matlens.pruning.choices import Choice, Method

_WAYS, _SOLVE = 16, 500  # passes, and operations over the cube of the width, of a block, on SmolLM2-135M
_TRIED = 0.8  # passes per block that greedy choice takes
_CHAINED = 0.5  # of all blocks, which chain fits
_FOLD = 12  # operations per token and squared width of the FFN that a fit of its matrix takes

app = typer.Typer()
TwoOrMore = Annotated[int, Between(2)]


def _blocks(text: str) -> int | list[int]:
    try:
        numbers = [int(part) for part in text.removesuffix(",").split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text[:40]!r}: expected how many, or their numbers with a comma behind each, such as 13,14,15 "
            "(one block alone: 13,)."
        ) from None
    return numbers if "," in text else numbers[0]


Blocks = Annotated[Any, typer.Option(parser=_blocks, metavar="BLOCKS")]


@command(app)
def linearity(
    model: ModelOptions,
    corpus: CorpusOptions,
    window: TwoOrMore = 64,
    windows: TwoOrMore = 80,
    judged: TwoOrMore = 4,
    every: PositiveInt = 2,
    seed: Seed = 0,
    out: Path = Path("out"),
) -> None:
    """Say how linear every part of a model is, and what it costs to put its map in its place.

    Nine tenths of the corpus are to fit on, the rest to judge on. A run that was killed resumes. A thorough
    run has '--every 1 --windows 160 --judged 8': it takes four times as long.

    Parameters
    ----------
    window
        Tokens of a window, or most of a sentence.
    windows
        Most windows or sentences to fit maps on.
    judged
        Most windows or sentences to take losses of.
    every
        Only parts of every so many blocks; 1 for all.
    seed
        Random seed of the split and of the positions.
    out
        Folder for everything that is written.
    """
    model.check()
    parts = corpus.tenth(seed)
    from matlens import plots
    from matlens.data.making import make_judged_text
    from matlens.io.files import check_writable
    from matlens.io.tables import write_results
    from matlens.linearity.atlas import ATLAS, atlas_seconds, linearity_atlas
    from matlens.linearity.ranking import CORRELATIONS, rank_correlations
    from matlens.models.identity import ModelIdentity

    tables = [f"{name}.{suffix}" for name in (ATLAS, CORRELATIONS) for suffix in ("csv", "json")]
    check_writable(out, [*tables, *(f"{ATLAS}.{suffix}" for suffix in ("png", "pdf"))])
    bridge = model.load()
    fitted_on, judged_on = (
        make_judged_text(bridge, part, size=window, most=most, seed=seed)
        for part, most in zip(parts, (windows, judged), strict=True)
    )
    n_tokens = len(fitted_on.examples.tokens), len(judged_on.examples.tokens)
    n_blocks = bridge.cfg.n_layers / every
    n_passed = 2 * n_tokens[0] + _WAYS * n_blocks * n_tokens[1]
    solving = _SOLVE * n_blocks * bridge.cfg.d_model**3
    print_expected(bridge, n_passed, solving, "--every, --windows, --judged")
    table = linearity_atlas(bridge, fitted_on, judged_on, folder=out / "atlas", every=every)
    with on_main("tables of the atlas") as is_main:
        if not is_main:
            return
        correlations = rank_correlations(table, seed=seed)
        origin = {
            "model": ModelIdentity.from_model(bridge).to_json(), "seed": seed, "window": window,
            "every": every, "n_fitted": len(fitted_on.examples.tokens), "n_judged": len(judged_on.truth),
            "atlas_seconds": atlas_seconds(out / "atlas"),
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
    choice: Choice = Choice.greedy,
    penalty: NonNegative | None = None,
    heal: NonNegativeInt = 0,
    window: TwoOrMore = 256,
    windows: PositiveInt = 40,
    judged: TwoOrMore = 20,
) -> None:
    """Leave blocks out, fold a map into the weights before them, and write a plain Hugging Face folder.

    Nine tenths of the corpus are for calibration, the rest to judge on. A thorough run has '--windows 160
    --judged 40'. It takes three times as long, and perplexity rises less: of SmolLM2-135M without 3 blocks by
    6%, not 8%.

    Parameters
    ----------
    out
        Folder for everything that is written.
    blocks
        How many blocks to leave out, or which: 13,14,15.
    attention
        Instead: of how many blocks attention is left out, or of which.
    method
        What becomes of the FFN's output matrix before each span; by default chain, and refit where attention
        is left out.
    choice
        How blocks are chosen where only their number is given.
    penalty
        How much it is held near what it was; by default 0.1 for refit, 0.3 for chain.
    heal
        Train the changed matrices alone on so many tokens, minutes for 100,000.
    window
        Tokens of a window of running text.
    windows
        Most windows to calibrate on.
    judged
        Most windows to judge both models on.
    """
    if (blocks is None) == (attention is None) or (attention is not None and heal):
        raise InputError(
            "Expected --blocks or --attention, and one of them alone; --heal goes with the first."
        )
    wanted: Any = blocks if attention is None else attention
    method = method or (Method.chain if attention is None else Method.refit)
    from matlens.pruning.saving import reserved, save_pruned

    with reserved(out):  # before the work, as the only one that does it
        model.check()
        fitted_on, judged_on = corpus.tenth()
        import pandas as pd

        from matlens.data.making import make_windows
        from matlens.pruning.choosing import CHOSEN_ON
        from matlens.pruning.evaluation import compare_costs, compare_pruned, judged_tokens
        from matlens.pruning.pruned import prune as prune_model
        from matlens.pruning.pruned import prune_attention

        bridge = model.load()
        calibration = make_windows(bridge, fitted_on, size=window, most=windows)
        judged_windows = make_windows(bridge, judged_on, size=window, most=judged)
        judged_tokens(judged_windows)  # refused before the work, as all that is
        n_calibration, n_judged = (int(text.lengths.sum()) for text in (calibration, judged_windows))
        n_layers, n_gone = bridge.cfg.n_layers, wanted if isinstance(wanted, int) else len(wanted)
        n_folded = _CHAINED * n_layers if method == Method.chain else n_gone
        tried = _TRIED * n_layers * CHOSEN_ON if isinstance(wanted, int) else 0
        print_expected(
            bridge, (1 + 2 * n_folded / n_layers) * n_calibration + tried + 2 * n_judged,
            _FOLD * n_folded * n_calibration * (bridge.cfg.d_mlp or 0) ** 2, "--windows, --judged",
        )  # fmt: skip
        if attention is None:
            pruned = prune_model(
                bridge, calibration, wanted, method=method, choice=choice, penalty=penalty, heal=heal
            )
        else:
            pruned = prune_attention(bridge, calibration, wanted, method=method, penalty=penalty)
        table = compare_pruned(bridge, pruned, judged_windows)
        costs = compare_costs(bridge, pruned)
        save_pruned(pruned, out, pd.concat([table, costs]))
    print_frame(
        "Judged on other text", table,
        {"method": "model", "metric": "measure", "value": "value", "low": "from", "high": "to"},
    )  # fmt: skip
    units = pd.Series({"seconds": 1e-3, "weights": 1e6, "cache": 1e3})
    of_models = costs.pivot_table(index="method", columns="metric", values="value").loc[["whole", "pruned"]]
    print_frame(
        "Writing tokens one by one",
        of_models[units.index].div(units).reset_index(),
        {
            "method": "model", "seconds": "ms a token", "weights": "MB of weights",
            "cache": "KB of cache a token",
        },
    )  # fmt: skip
    if healed := pruned.provenance.details.get("healed"):
        print_line(
            f"Healed on {healed['n_tokens']:,} tokens in {healed['seconds']:,.0f} seconds: "
            f"{number_text(healed['divergence'])} nats a token from the whole model."
        )
    what = "attention of the blocks" if attention is not None else "blocks"
    gone = pruned.blocks if attention is None else pruned.attention
    print_line(f"Without the {what} {', '.join(map(str, gone)) or 'none'}: {out}")
