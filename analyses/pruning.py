"""Compares methods and choices of pruned blocks, on the calibration corpus and another.

3, 6 and 9 blocks are removed. The published method is ReplaceMe on the span with the smallest angle. It is
compared with plain removal, scaled channels, and refitting the output matrix of the FFN before each span, on
spans that are most linear or increase the calibration loss least, and on blocks that are removed one at a
time. All maps are fitted on windows of the first corpus. Time and memory are per generated token, with the
cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd
import typer
from studies import Report, Study, run_study, show

from matlens import InputError
from matlens.data import Corpus, Examples, make_windows
from matlens.errors import check_int
from matlens.ffn import TextLosses
from matlens.io import result_row, result_table
from matlens.metrics import Estimate
from matlens.pruning import Calibration, Choice, Method, plain_copy, read_text, time_in_turns

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

NAME = "pruning"
SIZES = (3, 6, 9)
HEALED = f"{Method.chain}, healed"
_ROUNDS = 7  # rounds of timing the original and pruned models in turns
_PUBLISHED = (Choice.angle, Method.replaceme.value)
_RESAMPLES = 2000
_OF_A_ROW = ["corpus", "n_removed", "choice", "method"]


def main(
    studies: Iterator[Study],
    report: Report,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 256,
    windows: Annotated[int, typer.Option(min=1, help="Windows that maps are fitted on.")] = 120,
    eval_windows: Annotated[
        int, typer.Option(min=2, help="Windows of each corpus that models are evaluated on.")
    ] = 12,
    heal: Annotated[int, typer.Option(min=0, help="Tokens that the best is healed on; 0 for none.")] = 0,
    method: Annotated[list[Method] | None, typer.Option(help="Only these methods.")] = None,
    choice: Annotated[list[Choice] | None, typer.Option(help="Only these ways of choosing.")] = None,
    size: Annotated[
        list[int] | None,
        typer.Option(help="Number of removed blocks; by default 3, 6 and 9."),
    ] = None,
) -> None:
    """Prune blocks in every way, and print the recovered perplexity."""
    several = list(studies)
    model = several[0].model
    texts: dict[str, Corpus] = {study.parts[1].name: study.parts[1] for study in several}
    table = pruning_table(
        model,
        make_windows(model, several[0].parts[0], size=window, max_windows=windows),
        {
            name: make_windows(model, text, size=window, max_windows=eval_windows, name=name)
            for name, text in texts.items()
        },
        size or [n for n in SIZES if n < model.cfg.n_layers] or [1],
        methods=method or tuple(Method),
        choices=choice or tuple(Choice),
        heal=heal,
    )
    sizes_of_texts = {"windows": windows, "window": window, "eval_windows": eval_windows, "heal": heal}
    report.write(NAME, table, several[0].origin_of_weights | sizes_of_texts)
    added = added_perplexity(table).sort_values(["corpus", "n_removed", "perplexity"])
    show("Perplexity, and the share recovered of what ReplaceMe adds", added)


def pruning_table(
    model: TransformerBridge,
    windows: Examples,
    evaluated: Mapping[str, Examples],
    sizes: Sequence[int],
    *,
    methods: Sequence[Method] = tuple(Method),
    choices: Sequence[Choice] = tuple(Choice),
    heal: int = 0,
) -> pd.DataFrame:
    """Prune several numbers of blocks, by several choices and methods.

    A row for each number of blocks ``n``, ``choice``, ``method`` (with its ``blocks``), text and metric:
    ``perplexity``, its ``ratio`` to that of the original model, and ``agreement``, see `compare_pruned`;
    and, if ``replaceme`` of the span chosen by ``angle`` is one of them, the share ``recovered`` of what
    that adds to the perplexity, see `added_perplexity`. Rows of the method ``original`` are the original
    model's. The same blocks are folded and evaluated once. With ``heal``, ``chain`` with ``greedy``
    blocks is also healed on that many tokens of the windows: the method ``chain, healed``.

    Rows without a text are costs per token, see `compare_costs`: of the original, and with blocks
    removed, method ``pruned``, for any choice and method.
    """
    for size in sizes:
        check_int(size, "sizes", min=1, max=model.cfg.n_layers - 1)

    def read(of_model: Any, desc: str) -> dict[str, Any]:
        return {name: read_text(of_model, part, desc=desc) for name, part in evaluated.items()}

    originals = read(plain_copy(model), "original model")
    foldable = next((method for method in methods if method != Method.out), Method.out)
    calibration = Calibration.run(model, windows, foldable)

    def row(method: str, metric: str, estimate: Estimate, **more: Any) -> dict[str, Any]:
        columns = {"corpus": "", "n_removed": 0, "choice": "", "blocks": "", **more}
        return result_row(
            NAME, model=calibration.provenance.identity.name, method=method, layer=None, target=None,
            metric=metric, estimate=estimate, **columns,
        )  # fmt: skip

    rows = [
        row("original", "perplexity", of_text.losses.perplexity(), corpus=corpus)
        for corpus, of_text in originals.items()
    ]
    for (method, size), estimates in _costs(calibration, sizes).items():
        rows += [row(method, *estimate, n_removed=size) for estimate in estimates.items()]
    if Choice.greedy in choices:
        calibration.choose(max(sizes), Choice.greedy)  # the smaller are its beginning
    known: dict[tuple[tuple[int, ...], str], dict[str, Any]] = {}
    for size in sizes:
        chosen = {choice: calibration.choose(size, choice) for choice in choices}
        for (choice, removed), fold in itertools.product(chosen.items(), methods):
            healing = heal > 0 and choice == Choice.greedy and fold == Method.chain
            names = [fold.value, HEALED] if healing else [fold.value]
            if all((removed, name) in known for name in names):
                continue
            pruned = calibration.without(removed, fold)
            known[removed, fold.value] = read(pruned, f"{size} {fold}")
            if healing:
                calibration.heal(pruned, removed, fold, heal)
                known[removed, HEALED] = read(pruned, f"{size} {HEALED}")
        choice, method = _PUBLISHED
        published = known.get((chosen.get(choice, ()), method))
        named = [*map(str, methods), *([HEALED] if heal and Method.chain in methods else [])]
        for choice, name, corpus in itertools.product(choices, named, evaluated):
            if name == HEALED and choice != Choice.greedy:
                continue
            changed, original = known[chosen[choice], name][corpus], originals[corpus]
            estimates = changed.compare(original)
            if published is not None:
                estimates["recovered"] = recovered_estimate(
                    changed.losses, original.losses, published[corpus].losses
                )
            more: dict[str, Any] = {
                "n_removed": size,
                "choice": choice.value,
                "blocks": " ".join(map(str, chosen[choice])),
            }
            rows += [row(name, *estimate, corpus=corpus, **more) for estimate in estimates.items()]
    return result_table(rows, "n_removed", "choice", "blocks")


def _costs(calibration: Calibration, sizes: Sequence[int]) -> dict[tuple[str, int], dict[str, Estimate]]:
    """Costs per token of the original model, and with blocks removed."""
    rounds: list[float] = []
    costs: dict[tuple[str, int], dict[str, Estimate]] = {("original", 0): {}}
    for size in sizes:
        pruned = calibration.without(range(1, 1 + size), Method.out, progress=False)
        original, timed = time_in_turns([calibration.layout.model, pruned], rounds=_ROUNDS)
        rounds += original.rounds
        costs["original", 0] = original._replace(rounds=rounds).estimates()
        costs["pruned", size] = timed.estimates(original)
    return costs


def recovered_fraction(perplexity: Any, original: Any, published: Any) -> Any:
    """``1 - (perplexity - original) / (published - original)``."""
    return 1 - (perplexity - original) / (published - original)


def recovered_estimate(
    losses: TextLosses, original: TextLosses, published: TextLosses, *, seed: int = 0
) -> Estimate:
    """The recovered fraction, with its 95% interval by a bootstrap of the texts.

    All models read the same texts; the limits are percentiles over resamples. There is no interval for a
    single text, or if the fraction is undefined in some resamples.
    """
    n = len(losses.total)

    def share(index: np.ndarray) -> Any:
        with np.errstate(all="ignore"):
            return recovered_fraction(
                *(
                    np.exp(each.total[index].sum(-1) / each.n_tokens[index].sum(-1))
                    for each in (losses, original, published)
                )
            )

    value = float(share(np.arange(n)))
    resampled = share(np.random.default_rng(seed).integers(n, size=(_RESAMPLES, n)))
    if n < 2 or not np.isfinite(resampled).all():
        return Estimate.without_interval(value, n)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Estimate(value, float(low), float(high), n)


def added_perplexity(table: pd.DataFrame) -> pd.DataFrame:
    """Share of the perplexity added by ReplaceMe that other methods recover.

    ``recovered`` is ``1 - (perplexity - original) / (replaceme - original)``, where ``replaceme`` is the
    published method on the span that it chooses by the angle; ``low`` and ``high`` are its 95% interval,
    if the table has one.
    """
    perplexity = table[table["metric"] == "perplexity"]
    original = perplexity[perplexity["method"] == "original"].set_index("corpus")["value"]
    rest = perplexity[perplexity["method"] != "original"]
    choice, method = _PUBLISHED
    published = rest[(rest["method"] == method) & (rest["choice"] == choice)]
    if published.empty:
        raise InputError(
            "The table must have replaceme on a span chosen by angle, to compare with, got none."
        )
    published_values = published.set_index(["corpus", "n_removed"])["value"]
    keys = pd.MultiIndex.from_frame(rest[["corpus", "n_removed"]])
    recovered = recovered_fraction(
        rest["value"], rest["corpus"].map(original), published_values.reindex(keys).to_numpy()
    )
    limits = table[table["metric"] == "recovered"].set_index(_OF_A_ROW)[["low", "high"]]
    of_rest = limits.reindex(pd.MultiIndex.from_frame(rest[_OF_A_ROW]))
    return (
        rest[["corpus", "n_removed", "choice", "method", "blocks", "value"]]
        .rename(columns={"value": "perplexity"})
        .assign(recovered=recovered, low=of_rest["low"].to_numpy(), high=of_rest["high"].to_numpy())
    )


if __name__ == "__main__":
    run_study(main, corpus=["wikipedia-sample", "news-sample"], train=4000, val=600)
