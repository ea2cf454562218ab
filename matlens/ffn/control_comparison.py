"""Control beside its baselines: toxicity of continuations and perplexity in one table (paper B, Table 5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pandas as pd
from transformers import LogitsProcessor

from matlens.data.examples import Examples
from matlens.errors import InputError, Seed, checked
from matlens.ffn.baselines import SelfDebiasing
from matlens.ffn.control import PAPER_COEFFICIENT, controlled
from matlens.ffn.generation import continue_prompts
from matlens.ffn.graders import TOXICITY, Grader
from matlens.ffn.perplexity import TextLosses, perplexity_estimate, perplexity_ratio, text_losses
from matlens.ffn.projection import Projection, token_table, top_tokens_of_all, values_with_tokens
from matlens.ffn.selection import draw_harmless, grade_values
from matlens.ffn.toxicity import grade_continuations, toxicity_estimates
from matlens.ffn.values import ValueName, ValueVectors
from matlens.io.tables import check_columns, result_row
from matlens.metrics import Estimate
from matlens.models.vocabulary import word_tokens

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

UNCHANGED = "unchanged"
CONTROL = "table5_control"  # the experiment

_KEYS = ("method", "coefficient", "metric", "value")  # columns that scores are found by


@checked
class ModelChange(NamedTuple):
    """One way of changing what a model writes.

    Attributes
    ----------
    method
        What it is called in the table.
    coefficient, names
        What the coefficients of which value vectors are set to; None and nothing where none are.
    processor
        What becomes of the logits, such as `SelfDebiasing`.
    """

    method: str
    coefficient: float | None = None
    names: tuple[str, ...] = ()
    processor: LogitsProcessor | None = None

    def applied(self, model: TransformerBridge) -> AbstractContextManager[Any]:
        """The context that the model runs in."""
        if self.coefficient is None or not self.names:
            return nullcontext()
        return controlled(model, self.names, self.coefficient)

    def losses(self, model: TransformerBridge, texts: Examples) -> TextLosses | None:
        """What the changed model loses on texts; None where a processor gives tokens no probability."""
        if self.processor is None:
            return text_losses(model, texts)
        if isinstance(self.processor, SelfDebiasing):
            return text_losses(model, texts, debiasing=self.processor)
        return None

    def __str__(self) -> str:
        return self.method if self.coefficient is None else f"{self.method}, coefficient {self.coefficient:g}"


@checked
def choose_values(
    model: TransformerBridge,
    grader: Grader,
    words: Sequence[str],
    *,
    picked: Sequence[ValueName] = (),
    n: int = 10,
    seed: Seed = 0,
) -> dict[str, tuple[str, ...]]:
    """Value vectors to be turned on, by the method that they are chosen by.

    ``picked`` ones are those that are given; ``words``: the ``n`` that hold most of some words among their 30
    top tokens; ``graded``: ``n`` drawn among those whose top tokens a grader finds harmless. A method is
    called ``words, 10 vectors``; one that finds no vectors is left out.

    Parameters
    ----------
    model
        A model, whose value vectors are read.
    grader
        A grader of their top tokens.
    words
        Words to look for, each a single token.
    picked
        Names of value vectors that were picked by hand.
    n
        How many are chosen by words and by the grader.
    seed
        Seed of the draw among harmless ones.

    Raises
    ------
    InputError
        A word is not one token, a value vector does not exist, or too few are harmless.
    """
    values, projection = ValueVectors(model), Projection.from_model(model)
    word_tokens(projection.tokenizer, words)  # before the work, not after it
    vectors = {}
    if picked:
        vectors[f"picked, {len(picked)} vectors"] = tuple(str(values.resolve(name)) for name in picked)
    top = top_tokens_of_all(values, projection)
    by_words = values_with_tokens(values, projection, top, words)["value"].head(n)  # the best come first
    if len(by_words):
        vectors[f"words, {len(by_words)} vectors"] = tuple(by_words)
    scores = grade_values(values, top, projection.tokenizer, grader)
    vectors[f"graded, {n} vectors"] = tuple(draw_harmless(scores, n, seed=seed)["value"])
    return vectors


@checked
def tokens_of_chosen(
    model: TransformerBridge, vectors: Mapping[str, Sequence[ValueName]], *, k: int = 10
) -> pd.DataFrame:
    """Top tokens of the value vectors that each method has chosen, one row a token (paper B, Table 8).

    Columns are ``method``, and those of `matlens.ffn.token_table` but for ``side``.

    Parameters
    ----------
    model
        The model of the value vectors.
    vectors
        Names of value vectors by method, as `choose_values` gives them.
    k
        How many tokens of each.

    Raises
    ------
    InputError
        A value vector does not exist, or ``k`` is less than 1 or more than the vocabulary has.
    """
    values, projection = ValueVectors(model), Projection.from_model(model)
    tables = []
    for method, names in vectors.items():
        both = token_table(values, projection, names, k=k)
        tables.append(both[both["side"] == "top"].drop(columns="side"))
        tables[-1].insert(0, "method", method)
    if not tables:
        raise InputError("No value vectors are given. Expected those of one method at least.")
    return pd.concat(tables, ignore_index=True)


@checked
def changes_to_compare(
    vectors: Mapping[str, Sequence[str]],
    debiasing: SelfDebiasing,
    banned: LogitsProcessor,
    *,
    coefficients: Sequence[float] = (PAPER_COEFFICIENT,),
) -> list[ModelChange]:
    """The unchanged model, each set of value vectors at each coefficient, Self-Debiasing and WordFilter."""
    return [
        ModelChange(UNCHANGED),
        *(
            ModelChange(method, coefficient, tuple(names))
            for method, names in vectors.items()
            for coefficient in coefficients
        ),
        ModelChange("Self-Debiasing", processor=debiasing),
        ModelChange("WordFilter", processor=banned),
    ]


class ControlComparison(NamedTuple):
    """What `compare_control` gives.

    Attributes
    ----------
    table
        A tidy table with two more columns, ``attribute`` and ``coefficient``.
    texts
        All continuations with their scores, and the columns ``prompts``, ``method`` and ``coefficient``.
    """

    table: pd.DataFrame
    texts: pd.DataFrame


@checked
def compare_control(
    model: TransformerBridge,
    changes: Sequence[ModelChange],
    prompts: Mapping[str, Sequence[str]],
    texts: Examples,
    grader: Grader,
    *,
    n_samples: int | None = None,
    n_beams: int = 1,
    seed: Seed = 0,
    announce: Callable[[str], None] = lambda change: None,
) -> ControlComparison:
    """Continue prompts and read texts under every change; the first one is what others are set beside.

    Metrics are those of `toxicity_estimates` for every attribute of the grader, and ``perplexity`` and
    ``perplexity_ratio`` for changes that leave every token a probability; ``k`` is how many value vectors are
    set. ``score_change`` and ``perplexity_ratio`` compare with the first change, the unchanged model. The
    column ``corpus`` says which prompts were continued, or what was read.

    Parameters
    ----------
    model
        A model that predicts the next token.
    changes
        The ways of changing it, such as `changes_to_compare` gives, the unchanged model first.
    prompts
        Lists of texts to continue, each by its name in the table.
    texts
        What perplexity is measured on, such as `matlens.data.make_windows` gives.
    grader
        A grader of the continuations.
    n_samples, n_beams, seed
        How many continuations of each prompt are drawn, and by which seed; by default none, but the one that
        so many beams find, greedily with one.
    announce
        Is told each change before it begins.

    Raises
    ------
    InputError
        There are no changes or no prompts, or one cannot be continued or read; see `continue_prompts` and
        `text_losses`.
    """
    if not changes or not prompts:
        raise InputError(
            f"{len(changes)} changes of the model and {len(prompts)} lists of prompts are given. Expected "
            "the unchanged model at least, and a list of prompts by its name."
        )
    name, read = str(model.cfg.model_name), str(texts.provenance.get("corpus", "texts"))
    written, rows = [], list[dict[str, Any]]()
    graded: dict[str, pd.DataFrame] = {}
    base: TextLosses | None = None
    for change in changes:
        announce(str(change))
        with change.applied(model):
            losses = change.losses(model, texts)
            continuations = {
                listed: continue_prompts(
                    model, given, n_samples=n_samples, n_beams=n_beams, seed=seed, processor=change.processor
                )
                for listed, given in prompts.items()
            }
        for listed, continued in continuations.items():
            scored = grade_continuations(continued, grader)
            unchanged = graded.setdefault(listed, scored)
            written.append(
                scored.assign(prompts=listed, method=change.method, coefficient=change.coefficient)
            )
            for attribute in grader.attributes:
                for metric, estimate in toxicity_estimates(scored, unchanged, attribute):
                    rows.append(_row(change, name, listed, attribute, metric, estimate))
        base = base or losses
        if losses is not None and base is not None:
            for metric, estimate in (
                ("perplexity", perplexity_estimate(losses)),
                ("perplexity_ratio", perplexity_ratio(losses, base)),
            ):
                rows.append(_row(change, name, read, "", metric, estimate))
    return ControlComparison(pd.DataFrame(rows), pd.concat(written, ignore_index=True))


def _row(
    change: ModelChange, model: str, corpus: str, attribute: str, metric: str, estimate: Estimate
) -> dict[str, Any]:
    return result_row(
        CONTROL, model=model, corpus=corpus, method=change.method, layer=None, target=None, metric=metric,
        k=len(change.names) or math.nan, estimate=estimate, attribute=attribute,
        coefficient=change.coefficient,
    )  # fmt: skip


@checked
def main_scores(table: pd.DataFrame) -> pd.DataFrame:
    """The rows about toxicity and perplexity, without other attributes of the grader."""
    check_columns(table, ["attribute"], what="the table of ffn.compare_control")
    return table[table["attribute"].fillna("").isin([TOXICITY, ""])]


@checked
def attribute_table(table: pd.DataFrame) -> pd.DataFrame:
    """Shares of toxic continuations, the grader's attributes side by side, as Table 5 has them.

    Columns are ``prompts, method, coefficient``, then each attribute, ``perplexity`` and
    ``perplexity_ratio``; rows are as the table has them. Where there is no perplexity the cells are empty.

    Parameters
    ----------
    table
        A table of `compare_control`.
    """
    check_columns(table, _KEYS, what="the table of ffn.compare_control")
    table = table.assign(coefficient=pd.to_numeric(table["coefficient"].replace("", None)))
    shares = table[table["metric"] == "toxic"].rename(columns={"corpus": "prompts"})
    keys = ["prompts", "method", "coefficient"]
    wide = shares[keys].drop_duplicates(ignore_index=True)
    for attribute, of_attribute in shares.groupby("attribute", sort=False):
        wide = wide.merge(of_attribute[[*keys, "value"]].rename(columns={"value": str(attribute)}), on=keys)
    for metric in ("perplexity", "perplexity_ratio"):
        losses = table[table["metric"] == metric][[*keys[1:], "value"]].rename(columns={"value": metric})
        wide = wide.merge(losses, on=keys[1:], how="left")
    return wide


@checked
def estimates_by_change(table: pd.DataFrame) -> Iterator[tuple[str, float | None, dict[str, Estimate]]]:
    """Method, coefficient and estimates by metric of each change, in the order of the table.

    Where there are several lists of prompts, take the rows of one of them, and those of perplexity.
    """
    check_columns(table, _KEYS, what="the table of ffn.compare_control")
    for keys, rows in table.groupby(["method", "coefficient"], sort=False, dropna=False):
        method, coefficient = cast(tuple[str, float], keys)
        numbers = rows[["value", "low", "high"]].to_numpy(dtype=float)
        estimates = {
            str(metric): Estimate(values[0], values[1], values[2], int(n))
            for metric, values, n in zip(rows["metric"], numbers, rows["n"], strict=True)
        }
        yield str(method), None if pd.isna(coefficient) else float(coefficient), estimates
