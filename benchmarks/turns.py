"""What benchmarks share: works that are timed by turns in one process, a model and sentences to run it on."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import matlens
from matlens.corpora import Examples
from matlens.models import SMOLLM2, smollm2_path


def fastest(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each work in its fastest turn; they take turns, so that what slows one down slows all.

    With one thread (``OMP_NUM_THREADS=1``) they are seconds of the processor, of which other jobs on the
    machine take none.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            start = clock()
            work()
            best[name] = min(best[name], clock() - start)
    return best


def print_times(best: Mapping[str, float], job: str) -> None:
    """Print what was done, and the seconds of each work."""
    print(f"{job}, {torch.get_num_threads()} threads")
    for name, seconds in best.items():
        print(f"{name:{max(map(len, best))}} {seconds:7.2f} s")


def print_ratio(name: str, ratio: float, most: float, profiled: Callable[[], object] | None = None) -> None:
    """Print a ratio beside the aim, and where it is not reached what the time goes into."""
    print(f"{name}: {ratio:.2f} (aim: at most {most})")
    if ratio > most and profiled is not None:
        profile = cProfile.Profile()
        profile.runcall(profiled)
        pstats.Stats(profile).sort_stats("tottime").print_stats(12)


def smollm2_examples(sentences: int) -> tuple[Any, Examples]:
    """SmolLM2 as matlens loads it, and so many sentences of Wikipedia."""
    model = matlens.load(SMOLLM2, device="cpu")
    corpus, _ = matlens.load_corpus("wikipedia-sample").split(n_train=sentences, n_validation=2)
    return model, matlens.make_examples(model, corpus)


def plain_smollm2() -> Any:
    """SmolLM2 as transformers alone loads it, in float32."""
    path = smollm2_path()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
