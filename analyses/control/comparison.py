"""Steering compared with its baselines: toxicity and perplexity (paper B, Table 5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pandas as pd
from studies import Model
from transformers import LogitsProcessor

from control.baselines import SelfDebiasing, debiased_losses
from control.generation import continue_prompts
from control.graders import TOXICITY, Grader
from control.toxicity import grade_continuations, toxicity_estimates
from matlens.data import Examples
from matlens.ffn import TextLosses, controlled, text_losses
from matlens.io import result_row
from matlens.metrics import Estimate

UNCHANGED = "unchanged"
CONTROL = "table5_control"  # the experiment


class ModelChange(NamedTuple):
    """One way of modifying generation.

    Attributes
    ----------
    method
        Name in the table.
    coefficient, names
        Value vectors and the coefficient they are set to; None for none.
    processor
        Logits processors, such as `SelfDebiasing`.
    """

    method: str
    coefficient: float | None = None
    names: tuple[str, ...] = ()
    processor: LogitsProcessor | None = None

    def applied(self, model: Model) -> AbstractContextManager[Any]:
        """The context manager to run the model in."""
        if self.coefficient is None:
            return nullcontext()
        return controlled(model, self.names, self.coefficient)

    def losses(self, model: Model, texts: Examples) -> TextLosses | None:
        """Losses of the modified model; None if a processor gives tokens probability 0."""
        if self.processor is None:
            return text_losses(model, texts)
        if isinstance(self.processor, SelfDebiasing):
            return debiased_losses(model, texts, self.processor)
        return None

    def __str__(self) -> str:
        return self.method if self.coefficient is None else f"{self.method}, coefficient {self.coefficient:g}"


def changes_to_compare(
    vectors: Mapping[str, Sequence[str]],
    debiasing: SelfDebiasing,
    banned: LogitsProcessor,
    *,
    coefficients: Sequence[float] = (3.0,),
) -> list[ModelChange]:
    """The original, each set of vectors at each coefficient, and both baselines."""
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


def compare_control(
    model: Model,
    changes: Sequence[ModelChange],
    prompts: Mapping[str, Sequence[str]],
    texts: Examples,
    grader: Grader,
    **options: Any,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Continue prompts and measure losses under every change; the first is the reference.

    Returns a tidy table with two more columns, ``attribute`` and ``coefficient``, and all continuations with
    their scores. Metrics are those of `toxicity_estimates` for every attribute of the grader, and
    ``perplexity`` and ``perplexity_ratio`` for changes that give every token a probability; ``k`` is the
    number of value vectors. The column ``corpus`` names the list of prompts, or the text of the perplexity.
    """
    name, read = str(model.cfg.model_name), str(texts.provenance.get("corpus", "texts"))
    written, rows = [], list[dict[str, Any]]()
    graded: dict[str, pd.DataFrame] = {}
    base: TextLosses | None = None
    for change in changes:
        print(change)
        with change.applied(model):
            losses = change.losses(model, texts)
            continuations = {
                listed: continue_prompts(model, given, processor=change.processor, **options)
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
    return pd.DataFrame(rows), pd.concat(written, ignore_index=True)


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
