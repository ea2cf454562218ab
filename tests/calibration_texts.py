"""Calibration text of small models, the matrices that pruning changes, and passes without some modules."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from conftest import SITE_MODULES, WORDS

from matlens.data import Corpus

# The matrix by which an FFN writes, in each block.
WRITERS = {name: sites["ffn_post"][0] for name, sites in SITE_MODULES.items() if "ffn_post" in sites}
WRITERS["bloom"] = "mlp.dense_4h_to_h"


def running_text(n_words: int, seed: int = 3, name: str = "text") -> Corpus:
    words = np.random.default_rng(seed).choice(WORDS, n_words)
    return Corpus(name, (" ".join(words),), 1, 0, 0, 0)


@torch.no_grad()
def logits_without(
    model: Any, modules: Sequence[Any], tokens: torch.Tensor, *, nothing: bool = False
) -> torch.Tensor:
    """Logits of a plain model some of whose modules give what they are given, or nothing."""

    def replaced(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        first, *others = output if isinstance(output, tuple) else (output,)
        h = torch.zeros_like(first) if nothing else args[0] if args else kwargs["hidden_states"]
        return (h, *others) if isinstance(output, tuple) else h

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_hook(replaced, with_kwargs=True).remove)
        logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits
