"""Does a lens still read its model after fine-tuning? A small LoRA, merged, and the lens before and after.

A LoRA on attention and FFN is trained on the training sentences and merged. At held-out sentences, four
lenses are compared: that of the base model on the base model (``base``), the same lens on the tuned model
(``transferred``, by ``lens.on(tuned, strict=False)``), a lens fitted again on the tuned model (``refitted``),
and the logit lens of the tuned model (``id``). Each is compared with the model that it reads.

Needs the package peft: ``pip install "matlens[transfer]"``. Expect the lens that is fitted again to be a
little better than the one transferred, and both far better than the logit lens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from studies import Model, Report, Study, run_study
from training.running import sequence_losses, train

import matlens
from matlens import InputError, Lens, collect, metrics
from matlens.data import Examples
from matlens.errors import NonNegative, PositiveInt
from matlens.io import result_row, result_table
from matlens.lens import evaluate
from matlens.models import ModelIdentity
from matlens.pruning import plain_copy

NAME, AGAINST = "lens_transfer", "against"
METRICS = ("kl", None), ("precision", 1)
HELD_OUT = 50  # most sentences that the loss of both models is taken on


def main(
    study: Study,
    report: Report,
    steps: PositiveInt = 75,
    batch: PositiveInt = 4,
    rank: PositiveInt = 8,
    rate: NonNegative = 1e-3,
    layer: list[int] | None = None,
) -> None:
    """Tune a model by a LoRA, and compare lenses on it.

    Parameters
    ----------
    steps
        Training steps of the LoRA.
    batch
        Sentences of a step.
    rank
        Rank of the LoRA.
    rate
        Its largest learning rate.
    layer
        Layer that is read (repeatable); by default a third, two thirds and five sixths of the way.
    """
    model, last = study.model, study.n_layers
    layers = sorted({max(1, round(last * share / 6)) for share in (2, 4, 5)}) if layer is None else layer
    tuned, training = tune(study, steps=steps, batch=batch, rank=rank, rate=rate)
    options: Any = {"method": "mat", "layers": layers, "seed": study.seed, "progress": False}
    base = Lens.fit(model, study.parts[0], **options)
    lenses = {
        "base": base,
        "transferred": base.on(tuned, strict=False),
        "refitted": Lens.fit(tuned, study.parts[0], **options),
        "id": Lens.identity(tuned),
    }
    before, after = (
        collect(each, study.validation_examples, [*layers, last], progress=False) for each in (model, tuned)
    )
    read: dict[tuple[str, int | None], Any] = {}
    for name, lens in lenses.items():
        h = before if name == "base" else after
        predictions: dict[tuple[str, int | None], Any] = {(name, at): lens(h[at], at) for at in layers}
        read |= evaluate(lens.on_readout, h[last], predictions, kl=True, progress=False)
    # How far apart the models are: the base model's predictions against those of the tuned model.
    own = base.on_readout.logits(before[last])
    read |= evaluate(
        lenses["id"].on_readout, after[last], {("base model", None): lambda part: own[part]}, kl=True,
        progress=False,
    )  # fmt: skip
    table = compare(read, model=model.cfg.model_name, corpus=study.parts[1].name, target=last)
    origin = {
        **study.origin_of_weights, "tuned": ModelIdentity.from_model(tuned).to_json(), **training,
        "transferred_from": lenses["transferred"].provenance.details["transferred_from"],
        "layers": layers, "n_fitted": base.n_samples, "n_sentences": list(map(len, study.parts)),
    }  # fmt: skip
    report.write(NAME, table, origin)


def tune(study: Study, *, steps: int, batch: int, rank: int, rate: float) -> tuple[Model, dict[str, Any]]:
    """The model with a LoRA on attention and FFN merged into it, and how it was trained."""
    try:
        from peft import LoraConfig, LoraModel
    except ImportError as error:
        raise InputError('peft must be installed. Run: pip install "matlens[transfer]"') from error
    plain, folder = plain_copy(study.model), study.folder / NAME
    fitted, held_out = map(_sequences, study.examples)
    held_out = held_out[:HELD_OUT]
    first = float(sequence_losses(plain, held_out).mean())
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=_projections(plain))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(study.seed)
        adapted = LoraModel(plain, config, "default")
    run = train(
        plain, fitted, held_out, folder=folder / "training", n_updates=steps, batch_size=batch, rate=rate,
        every=steps, seed=study.seed,
    )  # fmt: skip
    n_parameters = sum(each.numel() for each in plain.parameters() if each.requires_grad)
    adapted.merge_and_unload().save_pretrained(folder / "tuned")
    study.model.tokenizer.save_pretrained(folder / "tuned")
    training = {
        "steps": steps, "batch": batch, "rank": rank, "rate": rate, "n_parameters": n_parameters,
        "losses": [first, run.curve[-1][2]], "n_held_out": len(held_out),
    }  # fmt: skip
    return matlens.load(folder / "tuned", device=study.model.cfg.device), training


def _projections(plain: Any) -> list[str]:
    """Names of all linear modules in the blocks: the projections of attention and FFN."""
    head = plain.get_output_embeddings()
    linear = {name: module for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}
    return sorted({name.split(".")[-1] for name, module in linear.items() if module is not head})


def _sequences(examples: Examples) -> list[list[int]]:
    """The tokens of each sentence, as the model reads them."""
    return [part.tolist() for part in np.split(examples.tokens, examples.offsets[1:-1])]


def compare(read: Mapping[tuple[str, int | None], Any], **cells: Any) -> pd.DataFrame:
    """KL and Precision@1 of each lens and layer, and differences of ``transferred`` to the others.

    They are paired by tokens, also where the models differ.
    """
    rows = []
    for (name, layer), evaluation in read.items():
        estimates = evaluation.estimates()
        for metric in METRICS:
            row: dict[str, Any] = {
                **cells,
                "method": name,
                "layer": layer,
                "metric": metric[0],
                "k": metric[1],
            }
            rows.append(result_row(NAME, **row, against="", estimate=estimates[metric]))
            if name in ("base", "refitted", "id"):
                ours, theirs = (each.values()[metric] for each in (read["transferred", layer], evaluation))
                apart = metrics.difference(ours, theirs) if metric[1] else metrics.mean(ours - theirs)
                row["method"] = "transferred"
                rows.append(result_row(NAME, **row, against=name, estimate=apart))
    return result_table(rows, AGAINST)


if __name__ == "__main__":
    run_study(main, corpus="news-sample", train=300, val=250)
