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
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, get_args

import numpy as np
import pandas as pd
import torch
from cuts.continuations import beginnings, compare, continuation_losses, continue_prompts, measures
from cuts.maps import Cut, insert_map, without_blocks
from figures.beyond import plot_pruned
from studies import Cells, Model, Report, Study, TwoOrMore, bootstrap, run_study, show
from torch import Tensor

from matlens import InputError, metrics
from matlens.data import Examples, make_windows
from matlens.errors import NonNegativeInt, PositiveInt, check_choice, check_int
from matlens.ffn import TextLosses
from matlens.io import result_row, result_table
from matlens.metrics import Estimate
from matlens.models import ModelIdentity
from matlens.pruning import Calibration, Choice, Method, plain_copy, read_text, time_in_turns

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
Pruned = tuple[tuple[int, ...], str]  # removed blocks, and the method
Cell = Mapping[str, Tensor]


def main(
    studies: Iterator[Study],
    report: Report,
    window: TwoOrMore = 256,
    windows: PositiveInt = 120,
    eval_windows: TwoOrMore = 12,
    heal: NonNegativeInt = 0,
    heal_method: list[str] | None = None,
    tokens: NonNegativeInt = 0,
    rounds: NonNegativeInt = ROUNDS,
    method: list[str] | None = None,
    choice: list[str] | None = None,
    size: list[int] | None = None,
) -> None:
    """Prune blocks in every way, and print the recovered perplexity.

    Parameters
    ----------
    window
        Tokens of a window.
    windows
        Windows that maps are fitted on.
    eval_windows
        Windows of each corpus that models are evaluated on.
    heal
        Tokens that models are healed on; 0 for none.
    heal_method
        Healed methods, with greedily chosen blocks; by default chain.
    tokens
        Tokens that models write; 0 for none.
    rounds
        Rounds of timing in turns; 0 for none.
    method
        Only these of out; magnitude; replaceme; refit; chain; linearpatch; linearpatch, rotated; jump; jump,
        chain; chain from jump. By default the first five.
    choice
        Only these ways of choosing: angle, r2, loss, greedy.
    size
        Number of removed blocks; by default 3, 6 and 9.
    """
    several = list(studies)
    model = several[0].model
    fitted_on = make_windows(model, several[0].parts[0], size=window, max_windows=windows)
    evaluated = {
        text.name: make_windows(model, text, size=window, max_windows=eval_windows, name=text.name)
        for text in (study.parts[1] for study in several)
    }
    origin = several[0].origin_of_weights | {
        "windows": windows, "window": window, "eval_windows": eval_windows, "heal": heal, "tokens": tokens,
    }  # fmt: skip
    job = origin | {"texts": [each.fingerprint for each in (fitted_on, *evaluated.values())]}
    with Cells.stored(several[0].folder / (NAME + report.suffix), "tables of pruned models", job) as cells:
        table = PrunedModels(
            model, fitted_on, evaluated, size or [n for n in SIZES if n < model.cfg.n_layers] or [1],
            methods=method or FOLDED, choices=choice or CHOICES, heal=heal,
            heal_methods=heal_method or ("chain",), tokens=tokens, rounds=rounds,
            cells=cells,
        ).table()  # fmt: skip
    written = table["decoding"] != ""
    origin |= cells.total
    losses = table[~written].drop(columns="decoding")
    report.write(NAME, losses, origin, plot_pruned(table) if tokens else None)
    if tokens:
        report.write(f"{NAME}_generation", table[written].drop(columns="blocks"), origin)
    if "recovered" in set(losses["metric"]):
        added = added_perplexity(losses).sort_values(["corpus", "n_removed", "perplexity"])
        show("Perplexity, and the share recovered of what ReplaceMe adds", added)


@dataclass(frozen=True)
class PrunedModels:
    """Models without several numbers of blocks, by several choices and methods, and their evaluation.

    Attributes
    ----------
    windows, evaluated
        Text that maps are fitted on, and texts by name that models are evaluated on.
    heal, heal_methods
        Tokens of the windows on which models with ``greedy`` blocks of these methods are healed, 0 for none.
    tokens
        How many tokens each model writes after the first 32 of each window of all texts.
    rounds
        Rounds of timing the original and pruned models in turns.
    """

    model: Model
    windows: Examples
    evaluated: Mapping[str, Examples]
    sizes: Sequence[int]
    methods: Sequence[str] = FOLDED
    choices: Sequence[str] = CHOICES
    heal: int = 0
    heal_methods: Sequence[str] = ("chain",)
    tokens: int = 0
    rounds: int = ROUNDS
    cells: Cells = field(default_factory=Cells)

    @cached_property
    def calibration(self) -> Calibration:
        """What all maps are fitted on."""
        foldable: Method = "out" if {*self.methods} == {"out"} else "refit"
        return Calibration.run(self.model, self.windows, foldable)

    @cached_property
    def original(self) -> Any:
        """The plain model with all blocks."""
        return plain_copy(self.model)

    def evaluate(self, of_model: Any, desc: str) -> dict[str, Tensor]:
        """Losses and top tokens of a plain model on each text, and what it writes."""
        found: dict[str, Tensor] = {}
        for name, part in self.evaluated.items():
            losses, top = read_text(of_model, part, desc=desc)
            found |= {f"losses of {name}": torch.from_numpy(losses.total), f"top of {name}": top}
        prompts = beginnings(self.evaluated.values(), _PROMPT)
        for decoding, options in DECODINGS.items() if self.tokens else ():
            written = continue_prompts(of_model, prompts, self.tokens, **options)
            of_original = continuation_losses(self.original, prompts, written)
            found |= {f"{decoding} tokens": written, f"{decoding} losses": of_original}
        return found

    def choose(self) -> dict[tuple[int, str], tuple[int, ...]]:
        """The removed blocks by their number and the way of choosing them."""
        chosen: dict[tuple[int, str], tuple[int, ...]] = {}

        def blocks_by(n: int, by: Any) -> dict[str, list[int]]:
            return {"blocks": list(map(int, self.calibration.choose(n, by)))}

        # The most first, since those chosen greedily include the fewer.
        for n, by in itertools.product(sorted(self.sizes, reverse=True), self.choices):
            cell = self.cells.get(f"{n} by {by}", partial(blocks_by, n, by))
            chosen[n, by] = tuple(cell["blocks"])
        return chosen

    def prune(self, chosen: Mapping[tuple[int, str], tuple[int, ...]]) -> dict[Pruned, Cell]:
        """Evaluations by removed blocks and method; the same blocks are evaluated once."""
        found: dict[Pruned, Cell] = {}

        def without(blocks: tuple[int, ...], method: Any) -> Any:
            if method in [*Cut]:
                return without_blocks(self.calibration, blocks, Cut(method))
            return self.calibration.without(blocks, method)

        def evaluate(made: Callable[[], Any], blocks: tuple[int, ...], name: str) -> Cell:
            if name.endswith(HEALED):  # in place, after the model was evaluated as it is
                self.calibration.heal(made(), blocks, "chain" if "chain" in name else "refit", self.heal)
            return self.evaluate(made(), f"{len(blocks)} {name}")

        removed = dict.fromkeys(chosen[n, by] for n in self.sizes for by in self.choices)
        for method, blocks in itertools.product(self.methods, removed):
            n, made = len(blocks), cache(partial(without, blocks, method))
            healed = self.heal > 0 and method in self.heal_methods and blocks == chosen.get((n, "greedy"))
            for name in (method, method + HEALED) if healed else (method,):
                key = f"{name} {' '.join(map(str, blocks))}"
                found[blocks, name] = self.cells.get(key, partial(evaluate, made, blocks, name))
        return found

    def row(self, **cells: Any) -> dict[str, Any]:
        """A row of the table; what is not given is of no text, choice or other model."""
        blank: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {"corpus": "", "n_removed": 0}
        name = ModelIdentity.from_model(self.model).name
        return result_row(NAME, model=name, layer=None, target=None, **blank | cells)

    def costs(self) -> Iterator[dict[str, Any]]:
        """Costs per token of the original model, with blocks removed, and with a map at the cut."""
        names = ["pruned", "jump"] if Cut.jump in self.methods else ["pruned"]
        calibration, rounds = self.calibration, list[float]()
        costs: dict[tuple[str, int], dict[str, Estimate]] = {("original", 0): {}}
        for size in self.sizes:
            models = [calibration.without(range(1, 1 + size), "out", progress=False) for _ in names]
            for model in models[1:]:
                layout = replace(calibration.layout, model=model)
                insert_map(layout, layout.blocks[0], torch.eye(len(layout.weight_of(layout.blocks[0]))))
            original, *others = time_in_turns([calibration.layout.model, *models], rounds=self.rounds)
            rounds += original.rounds
            costs["original", 0] = original._replace(rounds=rounds).estimates()
            costs |= {
                (name, size): each.estimates(original) for name, each in zip(names, others, strict=True)
            }
        for (method, size), estimates in costs.items():
            for metric, estimate in estimates.items():
                yield self.row(method=method, n_removed=size, metric=metric, estimate=estimate)

    def table(self) -> pd.DataFrame:
        """Compare all models.

        A row for each number of blocks ``n``, ``choice``, ``method`` (with its ``blocks``), text and metric:
        ``perplexity``, its ``ratio`` to that of the original model, and ``agreement``, see `compare_pruned`;
        if ``replaceme`` of the span chosen by ``angle`` is one of them, the share ``recovered`` of what that
        adds to the perplexity, see `added_perplexity`; and with ``jump`` the ``ratio`` to it and to
        ``chain``. Rows of the method ``original`` are the original model's. Healed models are the method
        ``chain, healed``, compared with ``jump, healed``.

        Rows with a ``decoding`` are of the tokens that the model writes: ``perplexity`` by the original
        model, and others of `cuts.measures`. With ``against``, a row is the paired ratio or difference to
        ``jump``, or of that to the original model.

        Rows without a text or a decoding are costs per token: of the original, with blocks removed, method
        ``pruned``, for any choice and method of `Method`, and of ``jump`` at one cut.
        """
        for size in self.sizes:
            check_int(size, "sizes", min=1, max=self.model.cfg.n_layers - 1)
        for method in (*self.methods, *self.heal_methods):
            check_choice(method, METHODS, "method")
        for choice in self.choices:
            check_choice(choice, CHOICES, "choice")
        originals = self.cells.get("original", lambda: self.evaluate(self.original, "original model"))
        chosen = self.choose()
        known = self.prune(chosen)
        ends = {self.model.tokenizer.eos_token_id}
        rows = [
            self.row(**of_row, method="original")
            for of_row in (*text_rows(originals, self.evaluated), *generation_rows(originals, ends))
        ]
        if self.rounds:
            timed = f"costs {Cut.jump in self.methods} {self.rounds} {' '.join(map(str, sorted(self.sizes)))}"
            rows += self.cells.rows(timed, self.costs)
        names = [*self.methods, *(method + HEALED for method in self.heal_methods)]
        for n, by in itertools.product(self.sizes, self.choices):
            blocks, (by_published, method) = chosen[n, by], _PUBLISHED
            pruned = {"n_removed": n, "choice": by, "blocks": " ".join(map(str, blocks))}
            published = known.get((chosen.get((n, by_published), ()), method))
            for name in names:
                is_healed = name.endswith(HEALED)
                if (blocks, name) not in known or (is_healed and by != "greedy"):
                    continue
                found, healed = known[blocks, name], HEALED * is_healed
                rivals = {
                    rival: known[blocks, rival + healed]
                    for rival in (RIVALS if Cut.jump in self.methods else ())
                    if (blocks, rival + healed) in known and rival + healed != name
                }
                against = {"jump": rivals.get("jump"), "original": originals}
                other = "original" if name == Cut.jump + healed else "jump"
                of_texts = text_rows(found, self.evaluated, originals, published, rivals)
                of_written = generation_rows(found, ends, other, against[other])
                rows += [self.row(**pruned | of_row, method=name) for of_row in (*of_texts, *of_written)]
        return result_table(rows, *COLUMNS)


def text_rows(
    found: Cell,
    corpora: Iterable[str],
    originals: Cell | None = None,
    published: Cell | None = None,
    rivals: Mapping[str, Cell] | None = None,
) -> Iterator[dict[str, Any]]:
    """Metrics of a model on each text, compared with others on the same windows."""
    for corpus in corpora:
        ours = losses_of(found, corpus)
        estimates = {("perplexity", ""): ours.perplexity()}
        if originals is not None:
            theirs, top = losses_of(originals, corpus), f"top of {corpus}"
            estimates["ratio", ""] = ours.ratio(theirs)
            estimates["agreement", ""] = metrics.proportion((found[top] == originals[top]).flatten())
            if published is not None:
                recovered = recovered_estimate(ours, theirs, losses_of(published, corpus))
                estimates["recovered", ""] = recovered
        for rival, of_rival in (rivals or {}).items():
            estimates["ratio", rival] = ours.ratio(losses_of(of_rival, corpus))
        for (metric, against), estimate in estimates.items():
            yield {"corpus": corpus, "metric": metric, "against": against, "estimate": estimate}


def losses_of(found: Cell, corpus: str) -> TextLosses:
    """Losses of a model on the windows of a text."""
    total = found[f"losses of {corpus}"].numpy()
    return TextLosses(total, np.full(len(total), found[f"top of {corpus}"].shape[1]))


def generation_rows(
    found: Cell, ends: Collection[int], against: str = "", other: Cell | None = None
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
    three = (losses, original, published)
    samples = np.stack([[each.total, each.n_tokens] for each in three], axis=-1).swapaxes(0, 1)

    def share(of_texts: np.ndarray) -> float:
        total, n_tokens = of_texts.sum(0)
        return float(recovered_fraction(*np.exp(total / n_tokens)))

    with np.errstate(all="ignore"):
        estimate = bootstrap(share, samples, np.random.default_rng(seed), resamples=_RESAMPLES)
    return estimate if len(samples) > 1 else Estimate.without_interval(estimate.value, 1)


def added_perplexity(table: pd.DataFrame) -> pd.DataFrame:
    """Share of the perplexity added by ReplaceMe that other methods recover.

    ``recovered`` is ``1 - (perplexity - original) / (replaceme - original)``, where ``replaceme`` is the
    published method on the span that it chooses by the angle; ``low`` and ``high`` are its 95% interval,
    if the table has one.
    """
    perplexity = table[table["metric"] == "perplexity"].rename(columns={"value": "perplexity"})
    original = perplexity[perplexity["method"] == "original"].set_index("corpus")["perplexity"]
    rest = perplexity.loc[perplexity["method"] != "original", [*_OF_A_ROW, "blocks", "perplexity"]]
    published = rest[(rest["choice"] == _PUBLISHED[0]) & (rest["method"] == _PUBLISHED[1])]
    if published.empty:
        raise InputError(
            "The table must have replaceme on a span chosen by angle, to compare with, got none."
        )
    keys = ["corpus", "n_removed"]
    added = rest.merge(published[[*keys, "perplexity"]], "left", on=keys, suffixes=("", "_published"))
    of_original, of_published = added["corpus"].map(original), added.pop("perplexity_published")
    added["recovered"] = recovered_fraction(added["perplexity"], of_original, of_published)
    limits = table.loc[table["metric"] == "recovered", [*_OF_A_ROW, "low", "high"]]
    return added.merge(limits, "left", on=_OF_A_ROW)


if __name__ == "__main__":
    run_study(main, corpus=["wikipedia-sample", "news-sample"], train=4000, val=600)
