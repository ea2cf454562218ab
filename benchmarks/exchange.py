"""Time and size of vectors written as Parquet and read back, against our own folders.

All layers at all positions of SmolLM2. Works take turns in one process; each write is into a new folder;
reading is of all vectors, with warm file caches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from ratios import Out, Rounds, Sentences, on_smollm2

import matlens
from matlens.activations import Activations, read_parquet, write_parquet

FORMS = {"Parquet": torch.float32, "Parquet in bfloat16": torch.bfloat16}


def main(sentences: Sentences = 200, rounds: Rounds = 3, out: Out = None) -> None:
    """Measure writing and reading both formats."""
    measured, model, examples = on_smollm2("exchange", out, sentences, rounds=rounds)
    everything: Any = {"positions": "all", "progress": False}
    with tempfile.TemporaryDirectory() as name:
        kept = Path(name)

        def collect() -> None:
            with tempfile.TemporaryDirectory(dir=kept) as folder:
                matlens.collect(model, examples, folder=Path(folder) / "vectors", **everything)

        def write(dtype: torch.dtype) -> None:
            with tempfile.TemporaryDirectory(dir=kept) as folder:
                write_parquet(vectors, Path(folder) / "vectors", dtype=dtype, progress=False)

        def read(form: str) -> None:
            stored = (Activations.load if form == "matlens" else read_parquet)(kept / form)
            for site in stored:
                stored[site].sum()

        vectors = matlens.collect(model, examples, folder=kept / "matlens", **everything)
        for form, dtype in FORMS.items():
            write_parquet(vectors, kept / form, dtype=dtype, progress=False)
        forms = ["matlens", *FORMS]
        works: dict[str, Callable[[], None]] = {"collecting to a matlens folder": collect}
        works |= {f"writing {form}": partial(write, dtype) for form, dtype in FORMS.items()}
        works |= {f"reading {form}": partial(read, form) for form in forms}
        measured.time(works, rounds)
        size = {form: sum(path.stat().st_size for path in (kept / form).rglob("*")) for form in forms}
    collecting = "collecting to a matlens folder"
    for form in FORMS:
        measured.ratio(f"writing {form} / {collecting}", f"writing {form}", collecting)
        measured.ratio(f"reading {form} / matlens", f"reading {form}", "reading matlens")
        measured.add(f"size of {form} / matlens", size[form] / size["matlens"])
    measured.add_times()
    measured.write()


if __name__ == "__main__":
    typer.run(main)
