"""Control compared with its baselines: toxicity and perplexity in one table (paper B, Table 5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pandas as pd
from transformers import LogitsProcessor

from control.baselines import SelfDebiasing
from control.generation import continue_prompts
from control.graders import TOXICITY, Grader
from control.perplexity import debiased_losses
from control.toxicity import grade_continuations, toxicity_estimates
from matlens.data.examples import Examples
from matlens.errors import Seed, checked
from matlens.ffn.control import controlled
from matlens.ffn.perplexity import TextLosses, text_losses
from matlens.io.tables import result_row
from matlens.metrics import Estimate

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

UNCHANGED = "unchanged"
CONTROL = "table5_control"  # the experiment


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
        if self.coefficient is None:
            return nullcontext()
        return controlled(model, self.names, self.coefficient)

    def losses(self, model: TransformerBridge, texts: Examples) -> TextLosses | None:
        """What the changed model loses on texts; None where a processor gives tokens no probability."""
        if self.processor is None:
            return text_losses(model, texts)
        if isinstance(self.processor, SelfDebiasing):
            return debiased_losses(model, texts, self.processor)
        return None

    def __str__(self) -> str:
        return self.method if self.coefficient is None else f"{self.method}, coefficient {self.coefficient:g}"


@checked
def changes_to_compare(
    vectors: Mapping[str, Sequence[str]],
    debiasing: SelfDebiasing,
    banned: LogitsProcessor,
    *,
    coefficients: Sequence[float] = (3.0,),
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
        See `continue_prompts`.
    announce
        Called with the name of each change before it begins.
    """
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
                ("perplexity", losses.perplexity()),
                ("perplexity_ratio", losses.ratio(base)),
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


def main_scores(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `compare_control` about toxicity and perplexity, without other attributes."""
    return table[table["attribute"].fillna("").isin([TOXICITY, ""])]


def attribute_table(table: pd.DataFrame) -> pd.DataFrame:
    """Shares of toxic continuations of `compare_control`, the grader's attributes side by side (Table 5).

    Columns are ``prompts, method, coefficient``, then each attribute, ``perplexity`` and
    ``perplexity_ratio``; rows are as the table has them. Where there is no perplexity the cells are empty.
    """
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


def estimates_by_change(table: pd.DataFrame) -> Iterator[tuple[str, float | None, dict[str, Estimate]]]:
    """Method, coefficient and estimates by metric of each change, in the order of the table.

    Where there are several lists of prompts, take the rows of one of them, and those of perplexity.
    """
    for keys, rows in table.groupby(["method", "coefficient"], sort=False, dropna=False):
        method, coefficient = cast(tuple[str, float], keys)
        numbers = rows[["value", "low", "high"]].to_numpy(dtype=float)
        estimates = {
            str(metric): Estimate(values[0], values[1], values[2], int(n))
            for metric, values, n in zip(rows["metric"], numbers, rows["n"], strict=True)
        }
        yield str(method), None if pd.isna(coefficient) else float(coefficient), estimates
