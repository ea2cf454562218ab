"""Resumable, seeded training of a small language model, its held-out losses and its vocabulary."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from matlens import InputError
from matlens.data import Corpus
from matlens.io import write_files
from matlens.parallel import Bar

STATE = "training.pt"
_WARM = 0.1  # share of the updates in the warm-up
_POOL = 32  # batches whose sequences are sorted by length together, for little padding
_BETAS, _DECAY, _CLIP = (0.9, 0.98), 0.01, 1.0


@dataclass
class TrainingRun:
    """Result of a training.

    Attributes
    ----------
    updates
        Number of updates so far.
    seconds
        CPU seconds of the updates, over all runs, without loading and held-out evaluation.
    curve
        ``(update, training loss, held-out loss)`` at intervals, in nats per token; the training loss is the
        mean since the previous entry.
    """

    updates: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, float, float]] = field(default_factory=list)


def warmed_cosine(step: int, n_steps: int) -> float:
    """Learning rate factor: linear warm-up over the first tenth, then a cosine to 0."""
    return min(1, (step + 1) / (_WARM * n_steps)) * 0.5 * (1 + math.cos(math.pi * step / n_steps))


def train(
    model: nn.Module,
    sequences: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[int]],
    *,
    folder: str | Path,
    n_updates: int,
    batch_size: int = 32,
    rate: float = 1e-3,
    every: int = 100,
    seed: int = 0,
    after_update: Callable[[int], None] = lambda update: None,
) -> TrainingRun:
    """Train a decoder on sequences of tokens, in place, and leave it in evaluation mode.

    Checkpoints are written atomically into the folder; an interrupted run resumes from the last one and ends
    with the same weights. ``after_update`` is called with the number of updates, from 0; after a resume, some
    numbers are repeated.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=_BETAS, weight_decay=_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmed_cosine(step, n_updates))
    job = {
        "n_updates": n_updates, "batch_size": batch_size, "rate": rate, "every": every, "seed": seed,
        "sequences": _digest(sequences), "held_out": _digest(held_out),
        "parameters": {name: list(p.shape) for name, p in model.named_parameters()},
    }  # fmt: skip
    path, parts = Path(folder) / STATE, {"model": model, "optimizer": optimizer, "schedule": schedule}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        run = _resume(path, job, parts) if path.is_file() else TrainingRun()
        losses: list[float] = []
        start = process_time()
        if run.updates == 0:
            after_update(0)
        bar = Bar(total=n_updates, initial=run.updates, desc="training", unit="update")
        with bar:
            while run.updates < n_updates:
                model.train()
                batch = _batch(sequences, run.updates, batch_size, seed)
                loss = next_token_losses(model, batch).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                run.updates += 1
                after_update(run.updates)
                bar.update(1)
                if run.updates % every == 0 or run.updates == n_updates:
                    run.seconds += process_time() - start
                    held_out_losses = sequence_losses(model, held_out, batch_size=batch_size)
                    run.curve.append(
                        (run.updates, math.fsum(losses) / len(losses), held_out_losses.mean().item())
                    )
                    if not all(map(math.isfinite, run.curve[-1])):
                        raise InputError(
                            f"The loss must be finite, got {run.curve[-1]} after {run.updates} updates. Use "
                            f"a rate below {rate:g}."
                        )
                    losses = []
                    _save(path, job, run, parts)
                    start = process_time()
    model.eval()
    return run


def next_token_losses(model: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Negative log-probability of each token but the first, concatenated."""
    device = next(model.parameters()).device
    texts = [torch.as_tensor(sequence, device=device) for sequence in sequences]
    tokens = pad_sequence(texts, batch_first=True)
    real = pad_sequence([torch.ones_like(text, dtype=torch.bool) for text in texts], batch_first=True)
    inputs, mask, predicted = tokens[:, :-1], real[:, :-1].long(), real[:, 1:]
    head = model.get_output_embeddings()
    targets = tokens[:, 1:][predicted]
    hidden = model.base_model(inputs, attention_mask=mask).last_hidden_state[predicted]
    return cross_entropy(head(hidden), targets, reduction="none")


@torch.inference_mode()
def sequence_losses(model: Any, sequences: Sequence[Sequence[int]], *, batch_size: int = 32) -> Tensor:
    """`next_token_losses` of many sequences, in evaluation mode and in batches."""
    model.eval()
    batches = (sequences[start : start + batch_size] for start in range(0, len(sequences), batch_size))
    return torch.cat([next_token_losses(model, batch).cpu() for batch in batches])


def _batch(sequences: Sequence[Sequence[int]], step: int, size: int, seed: int) -> list[Sequence[int]]:
    """Sequences of an update: each epoch is a permutation, sorted by length in chunks."""
    per_epoch = max(len(sequences) // size, 1)
    epoch, within = divmod(step, per_epoch)
    generator = np.random.default_rng((seed, epoch))
    order = generator.permutation(len(sequences))[: per_epoch * size]
    batches: list[np.ndarray] = []
    for start in range(0, len(order), _POOL * size):
        pool = order[start : start + _POOL * size]
        pool = pool[np.argsort([len(sequences[i]) for i in pool], kind="stable")]
        batches += np.split(pool, range(size, len(pool), size))
    return [sequences[i] for i in batches[int(generator.permutation(len(batches))[within])]]


def _digest(sequences: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(repr([list(map(int, tokens)) for tokens in sequences]).encode()).hexdigest()[:16]


def _save(path: Path, job: dict[str, Any], run: TrainingRun, parts: Mapping[str, Any]) -> None:
    """Write a checkpoint: the states of model, optimizer, schedule and random numbers, and progress."""
    state = {"job": job, "run": asdict(run), "generator": torch.get_rng_state()}
    content = io.BytesIO()
    torch.save(state | {name: part.state_dict() for name, part in parts.items()}, content)
    write_files({path: content.getbuffer()})


def _resume(path: Path, job: dict[str, Any], parts: Mapping[str, Any]) -> TrainingRun:
    """Restore the state of an interrupted run."""
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:  # of the archive, or of its content
        raise InputError(f"{path} is damaged ({type(error).__name__}). Remove it to train again.") from error
    if state["job"] != job:
        raise InputError(
            f"{path} must be of the same training, got other text, sizes, rate or seed. Remove it, or use "
            "another folder."
        )
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["generator"])
    return TrainingRun(**state["run"])


# Tokens of a corpus

END = "<|endoftext|>"  # as in GPT-2, before and after each text


def bpe_tokenizer(corpus: Corpus, *, n_tokens: int, longest: int) -> Any:
    """Train a byte-level BPE tokenizer, as in GPT-2, on a corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_tokens, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(corpus.sentences, trainer)
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=longest, name_or_path="", **ends
    )


def token_sequences(tokenizer: Any, corpus: Corpus, *, longest: int) -> list[list[int]]:
    """Token ids of each sentence, between two end-of-text tokens."""
    end = tokenizer.eos_token_id
    encoded = tokenizer(list(corpus.sentences), add_special_tokens=False, verbose=False)
    texts: Sequence[Sequence[int]] = encoded["input_ids"]
    return [[end, *tokens, end][:longest] for tokens in texts]
