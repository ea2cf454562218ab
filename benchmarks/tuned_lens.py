"""Train the lens of the package tuned-lens itself, and set it beside `tuned` and `polished` of matlens.

The package's own module maps and reads out the same rows; its training loop, which needs packages that are no
longer kept, is written out here with its defaults. Install it with ``pip install --no-deps tuned-lens``.

    python benchmarks/tuned_lens.py --layer 10 --train 2000
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from matlens import Lens, Readout, collect, load, load_corpus, make_examples
from matlens.estimators import LayerMap, polish, tune
from matlens.lens import Judgement, judge_scores

_STEPS, _PASSES = 250, 2


def train_package(model: Any, layer: int, h: Tensor, last: Tensor, readout: Readout) -> tuple[Any, float]:
    """The package's lens, one layer of it trained as its command does by default; and the seconds."""
    from tuned_lens.nn.lenses import TunedLens

    lens = TunedLens.from_model(model.original_model)
    parts = list(lens[layer].parameters())
    optimiser = torch.optim.SGD(parts, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / _STEPS)
    batch = -(-len(h) * _PASSES // _STEPS)
    generator = torch.Generator().manual_seed(0)
    order = torch.cat([torch.randperm(len(h), generator=generator) for _ in range(_PASSES + 1)])
    start = time.process_time()
    for step in range(_STEPS):
        rows = order[step * batch : (step + 1) * batch]
        truth = readout.log_probs(last[rows])
        scores = lens(h[rows], layer).log_softmax(-1)
        optimiser.zero_grad()
        (truth.exp() * (truth - scores)).sum(-1).mean().backward()
        torch.nn.utils.clip_grad_norm_(parts, 1.0)
        optimiser.step()
        schedule.step()
    return lens, time.process_time() - start


def show(name: str, judged: Judgement, seconds: float) -> None:
    """Print a line of the table."""
    values = {key: estimate.value for key, estimate in judged.estimates().items()}
    print(
        f"{name:24} P@1 {values['precision', 1]:.3f}  P@10 {values['precision', 10]:.3f}  surprisal "
        f"{values['surprisal', None]:.2f}  KL {values['kl', None]:.2f}  {seconds:7.1f} s",
        flush=True,
    )


def main(
    layer: Annotated[int, typer.Option(min=1)] = 10,
    train: Annotated[int, typer.Option(min=10)] = 2000,
    val: Annotated[int, typer.Option(min=10)] = 1000,
    out: Path = Path("out/tuned-lens"),
) -> None:
    """Fit all on the same rows, and judge them on the same tokens."""
    model = load("smollm2-135m")
    parts = load_corpus("wikipedia-sample").split(n_train=train, n_validation=val, seed=0)
    last = int(model.cfg.n_layers)
    rows = collect(
        model, make_examples(model, parts[0]), [layer, last], positions="all", folder=out / f"rows-{layer}"
    )
    tokens = collect(model, make_examples(model, parts[1]), [layer, last], folder=out / f"tokens-{layer}")
    h, h_last, x = rows[layer].clone(), rows[last].clone(), tokens[layer]
    readout = Readout(model)

    def judge(name: str, scores: Any, seconds: float) -> None:
        show(name, judge_scores(readout, tokens[last], {name: scores}, progress=False)[name], seconds)

    def time_map(name: str, fit: Any, norm: Any = None, before: float = 0.0) -> None:
        start = time.process_time()
        held: LayerMap = fit()
        seconds = before + time.process_time() - start
        judge(
            name,
            lambda part: held.scale * readout.logits(held(x[part] if norm is None else norm(x[part]))),
            seconds,
        )

    start = time.process_time()
    closed = Lens.fit(model, rows, method="normed+affine", layers=[layer], progress=False)
    seconds = time.process_time() - start
    judge("normed+affine", lambda part: closed.logits(x[part], layer), seconds)
    time_map(
        "polished",
        lambda: polish(readout, closed.maps[layer], h, h_last, norm=closed.norm),
        closed.norm,
        seconds,
    )
    time_map("tuned, of matlens", lambda: tune(readout, h, h_last, steps=_STEPS, passes=_PASSES))
    lens, seconds = train_package(model, layer, h, h_last, readout)
    with torch.no_grad():
        judge("tuned, of the package", lambda part: lens(x[part], layer), seconds)


if __name__ == "__main__":
    typer.run(main)
