"""A small BERT trained in minutes, for the masked-LM analyses on a machine without a model hub.

It is a toy beside a published BERT: what it shows is that masked prediction works from sentences to figures,
and how ``mat`` and ``id`` differ in a post-norm model. With a hub, give ``--model bert-base-uncased`` to the
analyses instead. The folder it writes is what their ``--model`` takes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from tokenizers import BertWordPieceTokenizer
from torch import Tensor
from tqdm.auto import tqdm

from matlens import InputError, load_corpus, options
from matlens.scripts import run_script

VOCABULARY, LONGEST, BATCH, RATE, MASKED = 6000, 48, 64, 1.5e-3, 0.2


def main(
    corpus: options.CorpusName = "wikipedia-sample",
    steps: Annotated[int, typer.Option(min=1, help="Updates of 64 sentences each.")] = 600,
    layers: Annotated[int, typer.Option(min=1)] = 6,
    d_model: Annotated[int, typer.Option(min=4, help="A multiple of 4.")] = 128,
    seed: options.Seed = 0,
    out: options.Out = Path("out/small-bert"),
) -> None:
    """Train a tokenizer and a masked-LM on a corpus, and save both as a Hugging Face folder."""
    if d_model % 4:
        raise InputError(f"--d-model {d_model} is not a multiple of 4, the number of heads.")
    torch.manual_seed(seed)
    sentences = list(load_corpus(corpus).sentences)
    tokenizer = make_tokenizer(sentences)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=d_model, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * d_model, max_position_embeddings=512, pad_token_id=tokenizer.pad_token_id,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / (0.1 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps)),
    )
    bar = tqdm(range(steps), desc="training", unit="update")
    for _ in bar:
        chosen = [sentences[i] for i in torch.randint(len(sentences), (BATCH,)).tolist()]
        batch = tokenizer(chosen, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        tokens, labels = masked(batch["input_ids"], tokenizer)
        loss = model(tokens, attention_mask=batch["attention_mask"], labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.2f}")
    model.eval().save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(out)


def make_tokenizer(sentences: list[str]) -> transformers.BertTokenizer:
    """Word pieces of the corpus, with BERT's special tokens."""
    pieces = BertWordPieceTokenizer(lowercase=True)
    pieces.train_from_iterator(sentences, vocab_size=VOCABULARY, show_progress=False)
    return transformers.BertTokenizer(vocab=pieces.get_vocab(), model_max_length=512)


def masked(tokens: Tensor, tokenizer: transformers.BertTokenizer) -> tuple[Tensor, Tensor]:
    """Mask a part of the tokens; labels are -100 elsewhere, which the loss leaves out."""
    special = torch.isin(tokens, torch.tensor(tokenizer.all_special_ids))
    chosen = (torch.rand(tokens.shape) < MASKED) & ~special
    return tokens.where(~chosen, tokenizer.mask_token_id), tokens.where(chosen, -100)


if __name__ == "__main__":
    run_script(main)
