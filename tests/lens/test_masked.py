"""A BERT that has learned a language: the whole masked protocol, and mat is better than id in the middle.

A sentence of the language is a marker, three words, and the three words again: as they were, or backwards,
as the marker says. So a masked word is known from the others, but only after two steps, the marker first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from conftest import WORDS, make_tokenizer
from torch import Tensor

import matlens
from matlens import MapSet, Readout, collect, make_examples
from matlens.activations.activations import Activations
from matlens.data.corpus import Corpus
from matlens.lens.evaluation import fit_quality, prediction_quality
from matlens.linear.fitting import fit_samples

N_LAYERS, D_MODEL = 4, 48
N_WORDS, AS_IT_WAS, BACKWARDS = 40, 40, 41
STEPS, BATCH, RATE = 330, 128, 3e-3
MIDDLE = (1, 2)  # layers that know part of the answer, in a form of their own


def language(n: int, seed: int) -> Tensor:
    """Numbers of the words of ``n`` sentences, ``[n, 7]``."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(N_WORDS, (n, 3), generator=generator)
    backwards = torch.randint(2, (n, 1), generator=generator).bool()
    marker = torch.where(backwards, BACKWARDS, AS_IT_WAS)
    return torch.cat([marker, words, torch.where(backwards, words.flip(1), words)], 1)


def corpus_of(sentences: Tensor) -> Corpus:
    texts = tuple(" ".join(WORDS[word] for word in sentence) for sentence in sentences.tolist())
    return Corpus("a language", texts, len(texts), 0, 0, 0)


def train(folder: Path) -> Path:
    """Train a small BERT from nothing to tell one masked word of each sentence, and save it."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(bert=True)
    ids = torch.tensor(tokenizer.convert_tokens_to_ids(WORDS))
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=D_MODEL, num_hidden_layers=N_LAYERS, num_attention_heads=4,
        intermediate_size=2 * D_MODEL, max_position_embeddings=16, pad_token_id=1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    rows = torch.arange(BATCH)
    ends = [torch.full((BATCH, 1), end) for end in (tokenizer.cls_token_id, tokenizer.sep_token_id)]
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 50) * (1 - step / STEPS)
        tokens = torch.cat([ends[0], ids[language(BATCH, 1000 + step)], ends[1]], 1)
        at = torch.randint(1, 8, (BATCH,), generator=torch.Generator().manual_seed(step))
        truth = tokens[rows, at].clone()
        tokens[rows, at] = tokenizer.mask_token_id
        loss = torch.nn.functional.cross_entropy(model(tokens).logits[rows, at], truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"))


class Run(NamedTuple):
    """The protocol on the language: fit on 1,000 sentences, judge on 400 others."""

    model: Any
    readout: Readout
    sentences: Tensor
    validation: Activations
    fit: pd.DataFrame
    prediction: pd.DataFrame


@pytest.fixture(scope="module")
def run(trained: Path) -> Run:
    model = matlens.load(str(trained), device="cpu")
    sentences = language(400, seed=2)
    parts = [corpus_of(language(1000, seed=1)), corpus_of(sentences)]
    examples = [make_examples(model, part, draw_special=False) for part in parts]
    fitted_on, validation = (collect(model, drawn, progress=False) for drawn in examples)
    pairs = [(a, b) for a in range(N_LAYERS) for b in range(a + 1, N_LAYERS + 1)]
    maps = MapSet(fit_samples(fitted_on, pairs))
    readout = Readout(model)
    return Run(
        model, readout, sentences, validation,
        fit_quality(maps, validation, progress=False),
        prediction_quality(readout, maps, validation, progress=False),
    )  # fmt: skip


def hidden_words(validation: Activations, sentences: Tensor) -> Tensor:
    """Ids of the words under the masks; positions count from [CLS]."""
    ids = torch.tensor(make_tokenizer(bert=True).convert_tokens_to_ids(WORDS))
    rows = torch.arange(len(sentences))
    return ids[sentences[rows, torch.from_numpy(validation.examples.positions) - 1]]


def precision(run: Run, method: str) -> list[float]:
    """Precision@1 by layer."""
    table = run.prediction
    chosen = table[(table["metric"] == "precision") & (table["k"] == 1) & (table["method"] == method)]
    assert chosen["layer"].tolist() == list(range(N_LAYERS + 1))
    return chosen["value"].tolist()


def r2(run: Run, method: str) -> dict[tuple[int, int], float]:
    chosen = run.fit[run.fit["method"] == method]
    return dict(zip(zip(chosen["layer"], chosen["target"], strict=True), chosen["value"], strict=True))


def test_the_model_knows_the_language(run: Run) -> None:
    """Without this the rest would prove nothing: the hidden word is told, and from its context alone."""
    known = hidden_words(run.validation, run.sentences) == run.readout.logits(
        run.validation[N_LAYERS]
    ).argmax(-1)
    word = torch.from_numpy(run.validation.examples.positions) > 1  # not [CLS], not the marker
    assert float(known[word].double().mean()) > 0.95
    # Where the words have nothing to do with one another there is nothing to know.
    noise = torch.randint(N_WORDS, (400, 7), generator=torch.Generator().manual_seed(3))
    examples = make_examples(run.model, corpus_of(noise), draw_special=False)
    collected = collect(run.model, examples, [N_LAYERS], progress=False)
    known = hidden_words(collected, noise) == run.readout.logits(collected[N_LAYERS]).argmax(-1)
    assert float(known.double().mean()) < 0.15


def test_nothing_is_known_at_the_embeddings(run: Run) -> None:
    """There the mask is all there is to see, so no map from there can tell the word."""
    assert precision(run, "mat")[0] < 0.2
    assert precision(run, "id")[0] < 0.2
    assert np.unique(run.validation[0].numpy().round(4), axis=0).shape[0] == 7  # one for each position


@pytest.mark.parametrize("layer", MIDDLE)
def test_mat_predicts_better_than_id_in_the_middle(layer: int, run: Run) -> None:
    mat, identity = precision(run, "mat")[layer], precision(run, "id")[layer]
    assert mat > identity + 0.15
    assert mat > 2 * precision(run, "mat")[0]


def test_mat_fits_better_than_id_between_all_layers(run: Run) -> None:
    mat, identity = r2(run, "mat"), r2(run, "id")
    assert set(mat) == {(a, b) for a in range(N_LAYERS) for b in range(a + 1, N_LAYERS + 1)}
    for pair, score in mat.items():
        assert score > identity[pair]
        if pair[0] in MIDDLE:
            assert score > identity[pair] + 0.1


def test_the_last_layer_predicts_itself(run: Run) -> None:
    assert precision(run, "mat")[-1] == precision(run, "id")[-1] == 1
    mat = precision(run, "mat")
    assert mat[-1] >= mat[3] > mat[1] > mat[0]
