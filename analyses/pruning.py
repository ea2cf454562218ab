"""Compares methods and choices of pruned blocks, on the calibration corpus and another.

3, 6 and 9 blocks are removed. The published method is ReplaceMe on the span with the smallest angle. It is
compared with plain removal, scaled channels, and refitting the output matrix of the FFN before each span, on
spans that are most linear or increase the calibration loss least, and on blocks that are removed one at a
time. All maps are fitted on windows of the first corpus. Time and memory are per generated token, with the
cache.

Maps that cannot be folded (LinearPatch, Ghosted Layers) are further methods, see `cuts.Cut`. With
``--tokens`` all models also continue the beginnings of the evaluation windows, and the original model
evaluates what they write. An interrupted run resumes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from time import process_time
from typing import TYPE_CHECKING, Annotated, Any, get_args

import numpy as np
import pandas as pd
import torch
import typer
from cuts import (
    Cells,
    Cut,
    beginnings,
    compare,
    continuation_losses,
    continue_prompts,
    insert_map,
    measures,
    without_blocks,
)
from figures.pruning import plot_pruned
from studies import SECONDS, Report, Study, run_study, show
from torch import Tensor

from matlens import InputError, metrics
from matlens.data import Corpus, Examples, make_windows
from matlens.errors import check_choice, check_int
from matlens.ffn import TextLosses
from matlens.io import Artifact, result_row, result_table
from matlens.metrics import Estimate
from matlens.models import ModelIdentity
from matlens.pruning import Calibration, Choice, Method, plain_copy, read_text, time_in_turns

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

NAME = "pruning"
SIZES = (3, 6, 9)
FOLDED: tuple[str, ...] = get_args(Method)
CHOICES: tuple[str, ...] = get_args(Choice)
METHODS = (*FOLDED, *Cut)
RIVALS = (Cut.jump.value, "chain")
DECODINGS: dict[str, dict[str, int]] = {"greedy": {}, "sampled": {"seed": 0}}
COLUMNS = ("n_removed", "choice", "blocks", "against", "decoding")
HEALED = ", healed"
_PROMPT = 32  # tokens of a window that are continued, or half of a shorter one
ROUNDS = 7  # of timing the original and pruned models in turns
_PUBLISHED = ("angle", "replaceme")
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
    heal: Annotated[int, typer.Option(min=0, help="Tokens that models are healed on; 0 for none.")] = 0,
    heal_method: Annotated[
        list[str] | None, typer.Option(help="Healed methods, with greedily chosen blocks; by default chain.")
    ] = None,
    heal_size: Annotated[
        list[int] | None, typer.Option(help="Healed numbers of removed blocks; by default all.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens that models write; 0 for none.")] = 0,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of timing in turns; 0 for none.")] = ROUNDS,
    method: Annotated[
        list[str] | None, typer.Option(help=f"Only these of {'; '.join(METHODS)}. By default the first five.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help=f"Only these ways of choosing: {', '.join(CHOICES)}.")
    ] = None,
    size: Annotated[
        list[int] | None,
        typer.Option(help="Number of removed blocks; by default 3, 6 and 9."),
    ] = None,
) -> None:
    """Prune blocks in every way, and print the recovered perplexity."""
    several = list(studies)
    model = several[0].model
    texts: dict[str, Corpus] = {study.parts[1].name: study.parts[1] for study in several}
    fitted_on = make_windows(model, several[0].parts[0], size=window, max_windows=windows)
    evaluated = {
        name: make_windows(model, text, size=window, max_windows=eval_windows, name=name)
        for name, text in texts.items()
    }
    sizes_of_texts = {"windows": windows, "window": window, "eval_windows": eval_windows, "heal": heal}
    origin = several[0].origin_of_weights | sizes_of_texts | {"tokens": tokens}
    job = origin | {"texts": [each.fingerprint for each in (fitted_on, *evaluated.values())]}
    with Artifact.writing(several[0].folder / (NAME + report.suffix), "pruned models", job) as artifact:
        cells = Cells(artifact)
        table = pruning_table(
            model, fitted_on, evaluated, size or [n for n in SIZES if n < model.cfg.n_layers] or [1],
            methods=method or FOLDED, choices=choice or CHOICES, heal=heal,
            heal_methods=heal_method or ("chain",), heal_sizes=heal_size, tokens=tokens, rounds=rounds,
            cells=cells,
        )  # fmt: skip
    written = table["decoding"] != ""
    origin |= {SECONDS: round(cells.seconds + process_time(), 1)}
    losses = table[~written].drop(columns="decoding")
    report.write(NAME, losses, origin, plot_pruned(table) if tokens else None)
    if tokens:
        report.write(f"{NAME}_generation", table[written].drop(columns="blocks"), origin)
    if "recovered" in set(losses["metric"]):
        added = added_perplexity(losses).sort_values(["corpus", "n_removed", "perplexity"])
        show("Perplexity, and the share recovered of what ReplaceMe adds", added)


def pruning_table(
    model: TransformerBridge,
    windows: Examples,
    evaluated: Mapping[str, Examples],
    sizes: Sequence[int],
    *,
    methods: Sequence[str] = FOLDED,
    choices: Sequence[str] = CHOICES,
    heal: int = 0,
    heal_methods: Sequence[str] = ("chain",),
    heal_sizes: Sequence[int] | None = None,
    tokens: int = 0,
    rounds: int = ROUNDS,
    cells: Cells | None = None,
) -> pd.DataFrame:
    """Prune several numbers of blocks, by several choices and methods.

    A row for each number of blocks ``n``, ``choice``, ``method`` (with its ``blocks``), text and metric:
    ``perplexity``, its ``ratio`` to that of the original model, and ``agreement``, see `compare_pruned`;
    if ``replaceme`` of the span chosen by ``angle`` is one of them, the share ``recovered`` of what
    that adds to the perplexity, see `added_perplexity`; and with ``jump`` the ``ratio`` to it and to
    ``chain``. Rows of the method ``original`` are the original model's. The same blocks are evaluated once.
    With ``heal``, some methods with ``greedy`` blocks are also healed on that many tokens of the windows: the
    method ``chain, healed``, compared with ``jump, healed``.

    Rows with a ``decoding`` are of ``tokens`` that the model writes after the first 32 of each window of all
    texts: ``perplexity`` by the original model, and others of `cuts.measures`. With ``against``, a row is the
    paired ratio or difference to ``jump``, or of that to the original model.

    Rows without a text or a decoding are costs per token, see `compare_costs`: of the original, with blocks
    removed, method ``pruned``, for any choice and method of `Method`, and of ``jump`` at one cut.
    """
    for size in sizes:
        check_int(size, "sizes", min=1, max=model.cfg.n_layers - 1)
    for method in (*methods, *heal_methods):
        check_choice(method, METHODS, "method")
    for choice in choices:
        check_choice(choice, CHOICES, "choice")
    cells, prompts = cells or Cells(), beginnings(evaluated.values(), _PROMPT)
    original = cache(partial(plain_copy, model))

    @cache
    def calibration() -> Calibration:
        foldable: Method = "out" if set(methods) == {"out"} else "refit"
        return Calibration.run(model, windows, foldable)

    def evaluate(of_model: Any, desc: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, part in evaluated.items():
            losses, top = read_text(of_model, part, desc=desc)
            found |= {f"losses of {name}": torch.from_numpy(losses.total), f"top of {name}": top}
        for decoding, options in DECODINGS.items() if tokens else ():
            written = continue_prompts(of_model, prompts, tokens, **options)
            losses_of = continuation_losses(original(), prompts, written)
            found |= {f"{decoding} tokens": written, f"{decoding} losses": losses_of}
        return found

    @lru_cache(maxsize=1)
    def fold(blocks: tuple[int, ...], method: Any) -> Any:
        if method in [*Cut]:
            return without_blocks(calibration(), blocks, Cut(method))
        return calibration().without(blocks, method)

    def of_pruned(blocks: tuple[int, ...], method: str, name: str) -> dict[str, Tensor]:
        made = fold(blocks, method)
        if name.endswith(HEALED):  # in place, after the model was evaluated as it is
            calibration().heal(made, blocks, "chain" if "chain" in method else "refit", heal)
        return evaluate(made, f"{len(blocks)} {name}")

    def choose(n: int, by: Any) -> dict[str, Tensor]:
        return {"blocks": torch.tensor(calibration().choose(n, by))}

    originals = cells.get("original", lambda: evaluate(original(), "original model"))
    chosen: dict[tuple[int, str], tuple[int, ...]] = {}
    for n, by in itertools.product(sorted(sizes, reverse=True), choices):  # fewer greedy ones are in more
        chosen[n, by] = tuple(cells.get(f"{n} by {by}", partial(choose, n, by))["blocks"].tolist())
    known: dict[tuple[tuple[int, ...], str], Mapping[str, Tensor]] = {}
    removed = dict.fromkeys(chosen[n, by] for n in sizes for by in choices)
    for method, blocks in itertools.product(methods, removed):
        names, n = [method], len(blocks)
        if heal > 0 and method in heal_methods and n in (heal_sizes or sizes):
            names += [method + HEALED] * (blocks == chosen.get((n, "greedy")))
        for name in names:
            key = f"{name} {' '.join(map(str, blocks))}"
            known[blocks, name] = cells.get(key, partial(of_pruned, blocks, method, name))
    row = partial(result_row, NAME, model=ModelIdentity.from_model(model).name, layer=None, target=None)
    ends = {model.tokenizer.eos_token_id}
    more: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {"corpus": "", "n_removed": 0}
    rows = [
        row(**more | of_row, method="original")
        for of_row in (*text_rows(originals, evaluated), *generation_rows(originals, ends))
    ]
    for (method, n), estimates in _costs(
        calibration, sizes if rounds else (), cells, rounds, Cut.jump in methods
    ).items():
        more["n_removed"] = n
        rows += [row(**more, method=method, metric=name, estimate=each) for name, each in estimates.items()]
    for n, by in itertools.product(sizes, choices):
        blocks, (by_published, method) = chosen[n, by], _PUBLISHED
        more |= {"n_removed": n, "choice": by, "blocks": " ".join(map(str, blocks))}
        published = known.get((chosen.get((n, by_published), ()), method))
        for name in [*methods, *(method + HEALED for method in heal_methods if by == "greedy")]:
            if (blocks, name) not in known:
                continue
            healed, found = HEALED * name.endswith(HEALED), known[blocks, name]
            rivals = {
                rival: known[blocks, rival + healed]
                for rival in (RIVALS if Cut.jump in methods else ())
                if (blocks, rival + healed) in known and rival + healed != name
            }
            against = {"jump": rivals.get("jump"), "original": originals}
            other = "original" if name == Cut.jump + healed else "jump"
            of_texts = text_rows(found, evaluated, originals, published, rivals)
            of_written = generation_rows(found, ends, other, against[other])
            rows += [row(**more | of_row, method=name) for of_row in (*of_texts, *of_written)]
    return result_table(rows, *COLUMNS)


def text_rows(
    found: Mapping[str, Tensor],
    corpora: Iterable[str],
    originals: Mapping[str, Tensor] | None = None,
    published: Mapping[str, Tensor] | None = None,
    rivals: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Metrics of a model on each text, compared with others on the same windows."""
    for corpus in corpora:
        top = found[f"top of {corpus}"]

        def losses(of_model: Mapping[str, Tensor]) -> TextLosses:
            total = of_model[f"losses of {corpus}"].numpy()  # noqa: B023
            return TextLosses(total, np.full(len(total), top.shape[1]))  # noqa: B023

        ours = losses(found)
        estimates = {("perplexity", ""): ours.perplexity()}
        if originals is not None:
            estimates["ratio", ""] = ours.ratio(losses(originals))
            same = top == originals[f"top of {corpus}"]
            estimates["agreement", ""] = metrics.proportion(same.flatten())
            if published is not None:
                recovered = recovered_estimate(ours, losses(originals), losses(published))
                estimates["recovered", ""] = recovered
        for rival, of_rival in (rivals or {}).items():
            estimates["ratio", rival] = ours.ratio(losses(of_rival))
        for (metric, against), estimate in estimates.items():
            yield {"corpus": corpus, "metric": metric, "against": against, "estimate": estimate}


def generation_rows(
    found: Mapping[str, Tensor],
    ends: Collection[int],
    against: str = "",
    other: Mapping[str, Tensor] | None = None,
) -> Iterator[dict[str, Any]]:
    """Measures of what a model writes, and their paired differences to those of another model."""
    for decoding in DECODINGS:
        if f"{decoding} tokens" not in found:
            continue
        ours, theirs = (
            None if each is None else measures(each[f"{decoding} tokens"], each[f"{decoding} losses"], ends)
            for each in (found, other)
        )
        for metric, values in (ours or {}).items():
            name = "perplexity" if metric == "loss" else metric
            yield {"decoding": decoding, "metric": name, "estimate": compare(metric, values)}
            if theirs is not None:
                estimate = compare(metric, values, theirs[metric])
                yield {"decoding": decoding, "metric": name, "against": against, "estimate": estimate}


def _costs(
    calibration: Callable[[], Calibration], sizes: Sequence[int], cells: Cells, n_rounds: int, with_jump: bool
) -> dict[tuple[str, int], dict[str, Estimate]]:
    """Costs per token of the original model, with blocks removed, and with a map at the cut."""

    def timed() -> dict[str, Tensor]:
        rounds: list[float] = []
        costs: dict[tuple[str, int], dict[str, Estimate]] = {("original", 0): {}}
        for size in sizes:
            names = ["pruned", "jump"] if with_jump else ["pruned"]
            models = [calibration().without(range(1, 1 + size), "out", progress=False) for _ in names]
            if with_jump:
                layout = replace(calibration().layout, model=models[1])
                insert_map(layout, layout.blocks[0], torch.eye(len(layout.weight_of(layout.blocks[0]))))
            original, *others = time_in_turns([calibration().layout.model, *models], rounds=n_rounds)
            rounds += original.rounds
            costs["original", 0] = original._replace(rounds=rounds).estimates()
            costs |= {
                (name, size): each.estimates(original) for name, each in zip(names, others, strict=True)
            }
        return {
            f"{method}/{size}/{metric}": torch.tensor([estimate.value, estimate.n]).double()
            for (method, size), estimates in costs.items()
            for metric, estimate in estimates.items()
        }

    costs: dict[tuple[str, int], dict[str, Estimate]] = {}
    stored = cells.get(f"costs {with_jump} {n_rounds} {' '.join(map(str, sorted(sizes)))}", timed)
    for name, (value, n) in ((name, each.tolist()) for name, each in stored.items() if "/" in name):
        method, size, metric = name.split("/")
        costs.setdefault((method, int(size)), {})[metric] = Estimate.without_interval(value, round(n))
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
