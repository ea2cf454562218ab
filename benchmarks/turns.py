"""What benchmarks share: works that are timed by turns in one process, and the plain model to run against."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from matlens.models import smollm2_path


def fastest(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each work in its fastest turn; they take turns, so that what slows one down slows all."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def plain_smollm2() -> Any:
    """SmolLM2 as transformers alone loads it, in float32."""
    path = smollm2_path()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
