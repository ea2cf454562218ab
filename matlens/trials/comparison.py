"""Methods and ways of choosing side by side, judged on the same texts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from matlens import metrics
from matlens.arguments import require_choice, require_whole
from matlens.control.perplexity import perplexity_estimate, perplexity_ratio
from matlens.corpora.examples import Examples
from matlens.corpora.readers import require_own_tokens
from matlens.errors import InputError
from matlens.metrics import Estimate
from matlens.models.identity import ModelIdentity
from matlens.pruning.calibration import Calibration, whole_windows
from matlens.pruning.choices import Choice, Method
from matlens.signatures import checked
from matlens.storage.tables import require_columns, result_row, result_table
from matlens.trials.evaluation import EXPERIMENT, read_text, speed

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

HEALED = "refit, healed"
_ROUNDS = 3  # in which each model is timed


@checked
def pruning_table(
    model: TransformerBridge,
    windows: Examples,
    judged: Mapping[str, Examples],
    sizes: Sequence[int],
    *,
    methods: Sequence[str] = tuple(Method),
    choices: Sequence[str] = tuple(Choice),
    heal: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Leave several numbers of blocks out, chosen in several ways and folded by several methods.

    A row for each number of blocks ``n``, ``choice``, ``method`` (with its ``blocks``), text and metric:
    ``perplexity``, its ``ratio`` to that of the whole model, and ``agreement``, see `compare_pruned`. Rows of
    the method ``whole`` are the whole model's. ``seconds`` are those of a token, see `speed`, and of no text.
    Blocks that two ways choose alike are folded and judged once.

    Parameters
    ----------
    model, windows
        See `prune`; every map is fitted on these windows.
    judged
        Other running text by name.
    sizes
        Numbers of blocks to leave out.
    methods, choices
        Names of `Method` and `Choice`.
    heal
        Where it is more than 0, ``refit`` of blocks chosen one after the other is also healed on so many
        tokens of the windows: the method ``refit, healed``.
    progress
        Whether to show bars.

    Raises
    ------
    InputError
        As in `prune`; or there is nothing to judge on.
    """
    of_methods = [Method(require_choice(method, Method, "A method")) for method in methods]
    of_choices = [Choice(require_choice(choice, Choice, "A choice")) for choice in choices]
    for size in sizes:
        require_whole(size, "A number of blocks to leave out", least=1, most=model.cfg.n_layers - 1)
    require_whole(heal, "heal", least=0, most=10**9)
    if not judged or not sizes or not of_methods or not of_choices:
        raise InputError(
            "There is nothing to compare: expected a text, a size, a method and a choice at least."
        )
    for texts in judged.values():
        require_own_tokens(model, texts)
    calibration = Calibration.run(model, windows, fold=set(of_methods) != {Method.out}, progress=progress)
    name = ModelIdentity.from_model(model).name
    tokens = {corpus: whole_windows(texts) for corpus, texts in judged.items()}
    whole = {
        corpus: read_text(calibration.layout.model, of_corpus, desc="whole model", progress=progress)
        for corpus, of_corpus in tokens.items()
    }
    rows = [
        result_row(
            EXPERIMENT, model=name, corpus=corpus, method="whole", layer=None, target=None,
            metric="perplexity", estimate=perplexity_estimate(read.losses), n_left_out=0, choice="",
            blocks="",
        )
        for corpus, read in whole.items()
    ]  # fmt: skip

    def time_row(timed: Any, **more: Any) -> dict[str, Any]:
        cost = speed(timed, rounds=_ROUNDS)
        return result_row(
            EXPERIMENT, model=name, corpus="", layer=None, target=None, metric="seconds",
            estimate=Estimate.without_interval(cost.seconds, _ROUNDS), **more,
        )  # fmt: skip

    rows.append(time_row(calibration.layout.model, method="whole", n_left_out=0, choice="", blocks=""))
    if Choice.greedy in of_choices:
        calibration.choose(max(sizes), Choice.greedy, progress=progress)  # the smaller are its beginning
    known: dict[tuple[Any, str], list[dict[str, Any]]] = {}
    for size, choice in itertools.product(sizes, of_choices):
        blocks = calibration.choose(size, choice, progress=progress)
        healing = heal > 0 and choice == Choice.greedy and Method.refit in of_methods
        for called in [*(method.value for method in of_methods), *([HEALED] if healing else [])]:
            if (blocks, called) not in known:
                method = Method.refit if called == HEALED else Method(called)
                pruned = calibration.without(blocks, method, progress=progress)
                if called == HEALED:
                    calibration.heal(pruned, blocks, heal, progress=progress)
                more: dict[str, Any] = {"n_left_out": size, "blocks": " ".join(map(str, blocks))}
                known[blocks, called] = [time_row(pruned, method=called, **more)]
                for corpus, of_corpus in tokens.items():
                    read = read_text(pruned, of_corpus, desc=f"{size} {called}", progress=progress)
                    same = (read.likeliest == whole[corpus].likeliest).flatten()
                    estimates = {
                        "perplexity": perplexity_estimate(read.losses),
                        "ratio": perplexity_ratio(read.losses, whole[corpus].losses),
                        "agreement": metrics.proportion(same),
                    }
                    known[blocks, called] += [
                        result_row(
                            EXPERIMENT, model=name, corpus=corpus, method=called, layer=None, target=None,
                            metric=metric, estimate=estimate, **more,
                        )
                        for metric, estimate in estimates.items()
                    ]  # fmt: skip
            rows += [row | {"choice": choice.value} for row in known[blocks, called]]
    return result_table(rows, "n_left_out", "choice", "blocks")


@checked
def added_perplexity(table: pd.DataFrame) -> pd.DataFrame:
    """How much of the perplexity that ReplaceMe adds is gone, for each size, choice, method and text.

    ``gone`` is ``1 - (perplexity - whole) / (replaceme - whole)``, where ``replaceme`` is the published
    method on the span that it chooses itself, by the angle.

    Parameters
    ----------
    table
        The table of `pruning_table`, with the method ``replaceme`` and the choice ``angle``.
    """
    require_columns(table, ("method", "choice", "n_left_out", "corpus", "metric", "value"), what="the table")
    perplexity = table[table["metric"] == "perplexity"]
    whole = perplexity[perplexity["method"] == "whole"].set_index("corpus")["value"]
    rest = perplexity[perplexity["method"] != "whole"]
    published = rest[(rest["method"] == Method.replaceme) & (rest["choice"] == Choice.angle)]
    if published.empty:
        raise InputError(
            "The table has no replaceme on a span chosen by angle. Expected what to compare with."
        )
    beside = published.set_index(["corpus", "n_left_out"])["value"]
    added = rest["value"] - rest["corpus"].map(whole)
    keys = pd.MultiIndex.from_frame(rest[["corpus", "n_left_out"]])
    of_published = beside.reindex(keys).to_numpy() - rest["corpus"].map(whole)
    columns = ["corpus", "n_left_out", "choice", "method", "blocks", "value"]
    return rest[columns].rename(columns={"value": "perplexity"}).assign(gone=1 - added / of_published)
