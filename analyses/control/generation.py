"""Prompts of files, and their continuations by the original model, with steering, or a baseline.

Each continuation has its own random numbers, from the seed, the index of its prompt and its sample
number. So they do not depend on batches or the key-value cache, and are the same for every method:
methods are comparable continuation by continuation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from studies import Model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from control.baselines import SelfDebiasing, prefixed_tokens
from matlens import InputError, make_prompts
from matlens.models import check_raw
from matlens.numerics import has_float64, in_float64
from matlens.parallel import Bar

CONTINUATION_TOKENS = 20  # of a continuation, as in the paper


@torch.inference_mode()
def continue_prompts(
    model: Model,
    prompts: Sequence[str],
    *,
    n_tokens: int = CONTINUATION_TOKENS,
    n_samples: int | None = None,
    n_beams: int = 1,
    seed: int = 0,
    processor: LogitsProcessor | None = None,
    batch_size: int = 64,
    use_cache: bool = True,
) -> pd.DataFrame:
    """Continue prompts by a fixed number of tokens, one row per continuation.

    Columns are ``prompt, sample, text``; the text is the continuation alone. The end-of-text token is never
    generated, so all have one length. Inside `controlled` or `matlens.patched` the modified model generates.
    """
    check_raw(model)
    prefixes = processor.prefixes if isinstance(processor, SelfDebiasing) else ()
    rows = [(p, s) for p in range(len(prompts)) for s in range(n_samples or 1)]
    tokens = [_prompt_variants(model, prompt, prefixes, n_tokens) for prompt in prompts]
    rows.sort(key=lambda row: -len(tokens[row[0]][0]))  # similar lengths together, the longest first
    config = GenerationConfig(
        max_new_tokens=n_tokens, min_new_tokens=n_tokens, do_sample=False, num_beams=n_beams,
        num_return_sequences=1, length_penalty=1.0, early_stopping=False, use_cache=use_cache,
        repetition_penalty=1.0, no_repeat_ngram_size=0, pad_token_id=_padding(model.tokenizer),
    )  # fmt: skip
    texts: dict[tuple[int, int], str] = {}
    with Bar(total=len(rows), desc="continuing", unit="text") as bar:
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            # All prompts without a prefix, then all with the first announcement, and so on.
            inputs = [tokens[p][variant] for variant in range(1 + len(prefixes)) for p, _ in batch]
            rows_of_ids = [torch.tensor(each) for each in inputs]
            pad = partial(pad_sequence, batch_first=True, padding_side="left")
            ids = pad(rows_of_ids, padding_value=_padding(model.tokenizer))
            mask = pad([torch.ones_like(each) for each in rows_of_ids])
            processors = [] if processor is None else [processor]
            if n_samples is not None:
                processors.append(_GumbelDraws(seed, batch, 1 + len(prefixes)))
            outputs = model.original_model.generate(
                input_ids=ids.to(model.cfg.device), attention_mask=mask.to(model.cfg.device),
                generation_config=config, logits_processor=LogitsProcessorList(processors),
            )  # fmt: skip
            new = outputs[: len(batch), ids.shape[1] :].tolist()
            texts |= {row: model.tokenizer.decode(added) for row, added in zip(batch, new, strict=True)}
            bar.update(len(batch))
    continuations = [(prompts[p], s, texts[p, s]) for p, s in sorted(rows)]
    return pd.DataFrame(continuations, columns=["prompt", "sample", "text"])


class _GumbelDraws(LogitsProcessor):
    """Adds what makes the likeliest token a draw from the distribution (Gumbel's trick), row by row."""

    def __init__(self, seed: int, batch: Sequence[tuple[int, int]], n_variants: int) -> None:
        self._generators = [
            np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, *row)))) for row in batch
        ]
        self._n_variants = n_variants

    def __call__(
        self, input_ids: Int[Tensor, "rows length"], scores: Float[Tensor, "rows d_vocab"]
    ) -> Float[Tensor, "rows d_vocab"]:
        noise = np.stack([generator.gumbel(size=scores.shape[1]) for generator in self._generators])
        wide = in_float64(scores.float())
        noisy = wide + torch.from_numpy(noise).repeat(self._n_variants, 1).to(wide.device)
        return noisy if has_float64(scores.device) else noisy.float().to(scores.device)


def _prompt_variants(model: Model, prompt: str, prefixes: Sequence[str], n_tokens: int) -> list[list[int]]:
    """Tokens of a prompt as it is, and after each prefix."""
    tokens = make_prompts(model, [prompt]).tokens.tolist()
    variants = [tokens, *(prefixed_tokens(model.tokenizer, prefix, tokens) for prefix in prefixes)]
    longest, context = max(map(len, variants)), model.cfg.n_ctx
    if longest + n_tokens > context:
        raise InputError(
            f"A prompt must have at most {context - n_tokens} tokens with prefixes, to leave {n_tokens} of "
            f"the context, got {longest} in {prompt[:60]!r}."
        )
    return variants


def _padding(tokenizer: Any) -> int:
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in tokens if token is not None), 0)


# Files of prompts

PROMPT_FIELD = "prompt"


def read_prompts(path: str | Path, *, field: str = PROMPT_FIELD, challenging: bool = False) -> list[str]:
    """Read prompts from a file, without blank ones.

    JSON lines, such as RealToxicityPrompts, have the prompt in a field: a text, or an object with a ``text``;
    with ``challenging`` only those that are marked so are read. Other files have one prompt a line.
    """
    path = Path(path).expanduser()
    is_json = path.suffix in (".json", ".jsonl")
    if challenging and not is_json:
        raise InputError(f"challenging requires JSON lines, got {path}.")
    lines = path.read_text("utf-8").splitlines()
    if is_json:
        rows = [json.loads(line) for line in lines if line.strip()]
        given = [row[field] for row in rows if not challenging or row["challenging"]]
        lines = [prompt["text"] if isinstance(prompt, dict) else prompt for prompt in given]
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"{path} has no prompts.")
    return prompts
