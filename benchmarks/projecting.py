"""What the top tokens of all value vectors cost, against the bare product of the same matrices.

Both go over the same blocks of value vectors and by turns. The product alone is the floor: every score has to
be computed to know which are largest. The memory is the peak while the top tokens are found, above what the
process holds with the model loaded.
"""

from __future__ import annotations

import threading
from typing import Annotated

import torch
import typer
from ratios import Measured, Out, Rounds
from watched import resident

import matlens
from matlens.ffn import Projection, ValueVectors
from matlens.models import SMOLLM2


class _Peak:
    """The largest resident memory while a context lasts, in MiB, looked at every few milliseconds."""

    def __enter__(self) -> _Peak:
        self.value, self._over = resident(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.value = max(self.value, resident())


@torch.inference_mode()
def _bare(values: ValueVectors, projection: Projection) -> None:
    e = projection.unembedding
    for layer in range(values.n_layers):
        for block in projection.blocks(values.layer(layer)):
            block @ e.T


def main(
    model: Annotated[str, typer.Option(help="What matlens.load reads.")] = SMOLLM2,
    top: Annotated[int, typer.Option(help="Tokens of each vector.")] = 30,
    rounds: Rounds = 2,
    out: Out = None,
) -> None:
    """Measure the time as a ratio to the bare product, and the memory above the model."""
    loaded = matlens.load(model, device="cpu")
    values, projection = ValueVectors(loaded), Projection.from_model(loaded)
    above: list[float] = []

    def project() -> None:
        before = resident()
        with _Peak() as peak:
            projection.top_of_all(values, top, progress=False)
        above.append(peak.value - before)

    measured = Measured("projecting", out, model=model, value_vectors=len(values), top=top, rounds=rounds)
    measured.time({"ours": project, "bare product": lambda: _bare(values, projection)}, rounds)
    measured.add_times()
    measured.ratio("top tokens of all value vectors / the product", "ours", "bare product", max=1.2)
    measured.add("memory above the model", max(above), unit="MiB", max=1024)
    measured.write()


if __name__ == "__main__":
    typer.run(main)
