"""Methods and ways of choosing side by side, judged on the same texts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd

from matlens.data.examples import Examples
from matlens.data.readers import check_own_tokens
from matlens.errors import Between, InputError, check_choice, check_int, checked
from matlens.ffn.perplexity import perplexity_estimate
from matlens.io.tables import result_row, result_table
from matlens.metrics import Estimate
from matlens.models.identity import ModelIdentity
from matlens.pruning.calibration import Calibration
from matlens.pruning.choices import Choice, Method
from matlens.pruning.evaluation import EXPERIMENT, ReadText, compare_texts, judged_tokens, read_text
from matlens.pruning.gone import GONE, PUBLISHED, gone_estimate
from matlens.pruning.healing import heal as train_folded
from matlens.pruning.timing import Timed, by_turns

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

HEALED = f"{Method.chain.value}, healed"
_ROUNDS = 7  # in which the whole model is timed beside one without so many blocks


@checked
def pruning_table(
    model: TransformerBridge,
    windows: Examples,
    judged: Mapping[str, Examples],
    sizes: Sequence[int],
    *,
    methods: Sequence[str] = tuple(Method),
    choices: Sequence[str] = tuple(Choice),
    heal: Annotated[int, Between(0, 10**9)] = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Leave several numbers of blocks out, chosen in several ways and folded by several methods.

    A row for each number of blocks ``n``, ``choice``, ``method`` (with its ``blocks``), text and metric:
    ``perplexity``, its ``ratio`` to that of the whole model, and ``agreement``, see `compare_pruned`; and,
    where ``replaceme`` of the span chosen by ``angle`` is among them, the share ``gone`` of what that adds to
    the perplexity, see `added_perplexity`. Rows of the method ``whole`` are the whole model's. Blocks that
    two ways choose alike are folded and judged once.

    Rows of no text say what a token costs, see `compare_costs`: of the whole model, and with so many blocks
    left out, method ``pruned``, whichever they are and whatever was folded.

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
        Where it is more than 0, ``chain`` of blocks chosen one after the other is also healed on so many
        tokens of the windows: the method ``chain, healed``.
    progress
        Whether to show bars.

    Raises
    ------
    InputError
        As in `prune`; or there is nothing to judge on, or one window alone.
    """
    of_methods = [Method(check_choice(method, Method, "A method")) for method in methods]
    of_choices = [Choice(check_choice(choice, Choice, "A choice")) for choice in choices]
    for size in sizes:
        check_int(size, "A number of blocks to leave out", min=1, max=model.cfg.n_layers - 1)
    if not judged or not sizes or not of_methods or not of_choices:
        raise InputError(
            "There is nothing to compare: expected a text, a size, a method and a choice at least."
        )
    for texts in judged.values():
        check_own_tokens(model, texts)
    tokens = {corpus: judged_tokens(texts) for corpus, texts in judged.items()}
    calibration = Calibration.run(model, windows, fold=set(of_methods) != {Method.out}, progress=progress)
    plain, name = calibration.layout.model, ModelIdentity.from_model(model).name
    whole = {
        corpus: read_text(plain, of_corpus, desc="whole model", progress=progress)
        for corpus, of_corpus in tokens.items()
    }

    def row(method: str, metric: str, estimate: Estimate, **more: Any) -> dict[str, Any]:
        columns = {"corpus": "", "n_left_out": 0, "choice": "", "blocks": "", **more}
        return result_row(
            EXPERIMENT, model=name, method=method, layer=None, target=None, metric=metric, estimate=estimate,
            **columns,
        )  # fmt: skip

    rows = [
        row("whole", "perplexity", perplexity_estimate(read.losses), corpus=corpus)
        for corpus, read in whole.items()
    ]
    of_whole, of_sizes = _costs(calibration, sizes)
    rows += [row("whole", *cost) for cost in of_whole.estimates().items()]
    rows += [
        row("pruned", metric, estimate, n_left_out=size)
        for size, estimates in of_sizes.items()
        for metric, estimate in estimates.items()
    ]
    if Choice.greedy in of_choices:
        calibration.choose(max(sizes), Choice.greedy, progress=progress)  # the smaller are its beginning
    known: dict[tuple[Any, str], dict[str, ReadText]] = {}
    for size in sizes:
        chosen = {choice: calibration.choose(size, choice, progress=progress) for choice in of_choices}
        tried: list[tuple[Choice, str]] = []
        chains = dict[tuple[int, ...], Any]()
        for choice, blocks in chosen.items():
            healing = heal > 0 and choice == Choice.greedy and Method.chain in of_methods
            for called in [*(method.value for method in of_methods), *([HEALED] if healing else [])]:
                tried.append((choice, called))
                if (blocks, called) not in known:
                    if called == HEALED:  # that has been judged as it was, and may be changed now
                        pruned = chains[blocks]
                        train_folded(
                            calibration.streams, pruned, blocks, Method.chain, heal, progress=progress
                        )
                    else:
                        pruned = calibration.without(blocks, Method(called), progress=progress)
                        if called == Method.chain:
                            chains[blocks] = pruned
                    known[blocks, called] = {
                        corpus: read_text(pruned, of_corpus, desc=f"{size} {called}", progress=progress)
                        for corpus, of_corpus in tokens.items()
                    }
        published = known.get((chosen.get(PUBLISHED[1]), PUBLISHED[0].value))
        for (choice, called), corpus in itertools.product(tried, tokens):
            read = known[chosen[choice], called][corpus]
            estimates = compare_texts(read, whole[corpus])
            if published is not None:
                estimates[GONE] = gone_estimate(read.losses, whole[corpus].losses, published[corpus].losses)
            more: dict[str, Any] = {
                "n_left_out": size,
                "choice": choice.value,
                "blocks": " ".join(map(str, chosen[choice])),
            }
            rows += [row(called, *estimate, corpus=corpus, **more) for estimate in estimates.items()]
    return result_table(rows, "n_left_out", "choice", "blocks")


def _costs(calibration: Calibration, sizes: Sequence[int]) -> tuple[Timed, dict[int, dict[str, Estimate]]]:
    """What a token costs the whole model, and without so many blocks: whichever these are, it is the same."""
    rounds: list[float] = []
    of_sizes: dict[int, dict[str, Estimate]] = {}
    for size in dict.fromkeys(sizes):
        pruned = calibration.without(range(1, 1 + size), Method.out, progress=False)
        whole, timed = by_turns([calibration.layout.model, pruned], rounds=_ROUNDS)
        rounds += whole.rounds
        of_sizes[size] = timed.estimates(whole)
    return whole._replace(rounds=rounds), of_sizes
