"""The lens of the package tuned-lens, trained and evaluated on the tokens of ``analyses/lens_report.py``.

The package's own module maps and reads out; its training loop, which needs packages that are no longer kept,
is written out here with its defaults, at 120,000 rows. What it saves is read by `Lens.from_tuned_lens` and
evaluated as the report's members are. Given the report's ``--out``, it finds the report's vectors there.

    pip install --no-deps tuned-lens
    python benchmarks/tuned_lens_package.py --train 4000 --val 1000 --out out/results
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from studies import Report, Study, run_study
from torch import Tensor

from matlens import Lens, Readout, collect, make_examples
from matlens.cli import print_members
from matlens.lens import evaluate_lenses, exit_sweep
from matlens.pruning import plain_copy

NAME = "tuned_lens"
METHOD = "tuned, by the package"
_STEPS, _ROWS = 250, 120_000


def train_layer(lens: Any, layer: int, h: Tensor, last: Tensor, readout: Readout) -> float:
    """Train one layer of the package's lens as its command does by default; the seconds of a processor."""
    parts = list(lens[layer].parameters())
    optimizer = torch.optim.SGD(parts, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / _STEPS)
    seen = min(2 * len(h), _ROWS)
    batch = -(-seen // _STEPS)
    generator = torch.Generator().manual_seed(0)
    order = torch.cat([torch.randperm(len(h), generator=generator) for _ in range(-(-seen // len(h)) + 1)])
    start = time.process_time()
    for step in range(_STEPS):
        rows = order[step * batch : (step + 1) * batch]
        truth = readout.log_probs(last[rows])
        scores = lens(h[rows], layer).log_softmax(-1)
        optimizer.zero_grad()
        (truth.exp() * (truth - scores)).sum(-1).mean().backward()
        torch.nn.utils.clip_grad_norm_(parts, 1.0)
        optimizer.step()
        schedule.step()
    return time.process_time() - start


def main(study: Study, report: Report, layer: list[int] | None = None) -> None:
    """Train the package's lens at some layers, and evaluate it as the report does its members.

    Parameters
    ----------
    layer
        A layer; give it once for each.
    """
    from tuned_lens import model_surgery
    from tuned_lens.nn.lenses import TunedLens

    # It looks for a class that TransformerLens 4 does not have.
    model_surgery._transformer_lens_available = False
    model, sixth = study.model, study.n_layers / 6
    of_report = [round(sixth), round(2 * sixth), round(4 * sixth)]
    layers = sorted(layer or of_report)
    collected = of_report if set(layers) <= {*of_report} else layers
    last = study.n_layers
    rows = collect(
        model, make_examples(model, study.parts[0], seed=study.seed), [*collected, last], positions="all",
        folder=study.folder / f"lens-rows-{'-'.join(map(str, collected))}",
    )  # fmt: skip
    examples = make_examples(model, study.parts[1], seed=study.seed)
    validation = collect(model, examples, folder=study.folder / "lens-validation")
    package = TunedLens.from_model(plain_copy(model))  # one of transformers' own classes
    h_last = rows[last].clone()
    seconds = sum(train_layer(package, at, rows[at].clone(), h_last, study.readout) for at in layers)
    folder = report.out / NAME
    package.save(folder)
    read = Lens.from_tuned_lens(folder, model)
    lens = replace(read, maps={at: read.maps[at] for at in layers})
    table = evaluate_lenses({METHOD: lens}, validation, layers=layers, seconds={METHOD: seconds})
    print_members(table, exit_sweep({METHOD: lens}, validation, layers=layers))
    report.write(NAME, table, {**validation.provenance.to_json("model", "data"), "n_rows": rows.n_rows})


if __name__ == "__main__":
    run_study(main, train=4000, val=1000)
