"""A fit of the width of large models, on a synthetic stream: its error, and its memory against the plan.

The stream has coordinates a thousand times larger than the rest, and the targets are a known map of it in
float64, so the error of the fitted map's predictions is known without another fit. One or two minutes at the
default width.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from ratios import Measured, Out, fastest
from watched import MIB, peak, resident

from matlens.linear import LeastSquares


def main(
    width: Annotated[int, typer.Option(help="d_model.")] = 4096,
    updates: Annotated[int, typer.Option(help="Batches of as many samples as the width.")] = 3,
    split: Annotated[bool, typer.Option(help="Products of slices in float32.")] = False,
    solved: Annotated[
        bool, typer.Option("--solved/--unsolved", help="Solve the same by torch.linalg.lstsq as well.")
    ] = True,
    out: Out = None,
) -> None:
    """Measure the error and the memory of a fit."""
    generator = torch.Generator().manual_seed(0)

    def batch() -> torch.Tensor:
        x = torch.randn(width, width, generator=generator)
        x[:, :: max(width // 4, 1)] *= 1000
        return x

    known = torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5
    xs = [batch() for _ in range(updates)]
    ys = [x.double() @ known.T for x in xs]
    sums, before = LeastSquares(width, width, split=split), resident()

    def update() -> None:
        for x, y in zip(xs, ys, strict=True):
            sums.update(x, y)

    seconds = fastest({"updates": update}, 1)["updates"]
    later = updates > 1  # samples, the old factor on top of them, its Q, and both sums
    planned = 8 * width * width * (9 if later else 6)
    taken = (peak() - before) * MIB
    measured = Measured("wide", out, width=width, samples=updates * width, split=split)
    measured.add("updates", seconds, unit="seconds")
    measured.add("memory of a fit, planned", planned / 1e9, unit="GB")
    measured.add("memory of a fit / planned", taken / planned, max=1.1, min=0.9)
    weight, _ = sums.solution(intercept=False, ridge=0.0)
    errors = [float((x.double() @ weight.T - y).norm() / y.norm()) for x, y in zip(xs, ys, strict=True)]
    measured.add("error of predictions against the known map", max(errors), unit="relative", max=1e-10)
    if solved:
        reference = torch.linalg.lstsq(torch.cat(xs).double(), torch.cat(ys), driver="gels").solution.T
        off = max(
            float((x.double() @ (weight - reference).T).norm() / y.norm())
            for x, y in zip(xs, ys, strict=True)
        )
        measured.add("predictions against torch.linalg.lstsq in float64", off, unit="relative", max=1e-10)
    measured.write()


if __name__ == "__main__":
    typer.run(main)
