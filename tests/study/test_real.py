"""SmolLM2 on Wikipedia sentences: our numbers are those of a computation that shares no code with us.

The output shown in README and on pages is what their code prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from blocks import PROJECT, Block, blocks_of
from conftest import refuse_connections
from independent import quality_by_hand

import matlens
from matlens.data.examples import Examples
from matlens.models.places import SMOLLM2, smollm2_path
from matlens.models.weights import plain_state

pytestmark = pytest.mark.real
# `make verify` gives as many training sentences and more: all pairs, and pages that take minutes.
FULL = 2000


class Loaded(NamedTuple):
    """The model as matlens loads it, and the connections that were tried meanwhile."""

    model: Any
    tried: list[str]


class Both(NamedTuple):
    """The table that matlens makes, and the independent numbers."""

    results: pd.DataFrame
    reference: dict[str, np.ndarray]
    n_layers: int


@pytest.fixture(scope="module")
def loaded():
    """The model of all tests, loaded while every connection is refused."""
    with pytest.MonkeyPatch.context() as patch:
        tried = refuse_connections(patch)
        return Loaded(matlens.load(SMOLLM2, device="cpu"), tried)


@pytest.fixture(scope="module")
def plain(request, loaded):
    """The same weights through transformers alone; below `FULL` not read again, which takes long."""
    if request.config.getoption("--real-train") < FULL:
        model = type(loaded.model.original_model)(loaded.model.original_model.config)
        model.load_state_dict(plain_state(loaded.model), strict=False)
        return model.eval()
    path: Path = smollm2_path()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def both(request, loaded, plain):
    """Fit and evaluate the same sentences and positions twice, ours batched, theirs one at a time.

    Below `FULL` sentences these are short ones, and maps onto the last layer alone.
    """
    n_train, n_val = request.config.getoption("--real-train"), request.config.getoption("--real-val")
    full = n_train >= FULL
    corpus = matlens.load_corpus("wikipedia-sample", limit=None if full else 1500)
    if not full:
        short = tuple(sentence for sentence in corpus.sentences if 6 <= len(sentence.split()) <= 11)
        corpus = replace(corpus, sentences=short)
    train, validation = corpus.split(n_train=n_train, n_validation=n_val)

    model = loaded.model
    parts = [without_first_words(matlens.make_examples(model, part)) for part in (train, validation)]
    fitted_on, tested_on = (matlens.collect(model, part) for part in parts)
    n_layers = model.cfg.n_layers
    maps = matlens.MapSet.fit(fitted_on, pairs="all" if full else "last")
    results = pd.concat(
        [
            matlens.lens.fit_quality(maps, tested_on),
            matlens.lens.prediction_quality(matlens.Readout(model), maps, tested_on),
        ]
    )
    sampled = [
        (part.sentences, of.positions.tolist()) for part, of in zip((train, validation), parts, strict=True)
    ]
    theirs = quality_by_hand(plain, model.tokenizer, *sampled, pairs="all" if full else "last")
    return Both(results, theirs, n_layers)


def without_first_words(examples: Examples) -> Examples:
    """The same sentences, and where the position is one of the first tokens, the last one instead.

    Sentences that begin alike have one vector there, up to the rounding of the model's products, which
    depends on the batch and on the threads. Least squares on fewer samples than dimensions follows even
    that rounding, and then no two computations agree.
    """
    last = examples.lengths - 1
    return replace(examples, positions=np.where(examples.positions < 5, last, examples.positions))


def _ours(both: Both, method: str, metric: str, k: int | None = None) -> np.ndarray:
    table = both.results
    chosen = table[(table["method"] == method) & (table["metric"] == metric)]
    if k is not None:
        chosen = chosen[chosen["k"] == k]
    return chosen.sort_values("layer")["value"].to_numpy(dtype=float)


@pytest.mark.parametrize("method", ["mat", "id"])
def test_numbers_are_those_of_the_independent_computation(both, method):
    table = both.results[(both.results["metric"] == "r2") & (both.results["method"] == method)]
    theirs = both.reference[f"r2_{method}"][table["layer"], table["target"]]
    ours = table["value"].to_numpy(dtype=float)
    assert len(ours) >= both.n_layers
    # Where too few samples make r2 hugely negative, a thousandth is meant of the number itself.
    difference = np.abs(ours - theirs) / np.maximum(1, np.abs(theirs))
    print(f"\nr2 {method}: {len(ours)} pairs, largest difference {difference.max():.1e}")
    assert difference.max() < 1e-3
    precision = both.reference[f"precision_{method}"]
    for column, k in enumerate((1, 5, 10)):
        ours = _ours(both, method, "precision", k)
        assert len(ours) == both.n_layers + 1
        difference = np.abs(ours - precision[:, column])
        print(f"Precision@{k} {method}: largest difference {difference.max():.4f}")
        assert difference.max() <= 0.003
    difference = np.abs(_ours(both, method, "surprisal") - both.reference[f"surprisal_{method}"])
    print(f"surprisal {method}: largest difference {difference.max():.5f}")
    assert difference.max() < 0.01


def test_mat_predicts_better_than_id(both):
    """The paper's main claim, where there are samples enough for it."""
    mat, plain = _ours(both, "mat", "precision", 1), _ours(both, "id", "precision", 1)
    assert mat[-1] == plain[-1] == 1
    assert mat[:-1].mean() > plain[:-1].mean()


def test_smollm2_is_loaded_from_its_wheel_without_network(loaded):
    model = loaded.model
    assert loaded.tried == []
    assert (model.cfg.n_layers, model.cfg.d_model, model.cfg.model_name) == (30, 576, SMOLLM2)
    tokens = model.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert tokens.shape == (1, 5)  # no BOS
    assert model.tokenizer.decode(model(tokens, return_type="logits")[0, -1].argmax()) == " Paris"


# Pages that show output


def printed(path: Path) -> Iterator[tuple[Block, str | None]]:
    """Python blocks of a page, each with the output that follows it."""
    blocks = blocks_of(path)
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language == "python":
            yield block, following.source if following and following.language == "text" else None


@pytest.mark.parametrize("name", ["README.md", "docs/how-to/patching.md", "docs/how-to/updates.md"])
def test_pages_print_what_they_show(name, capsys, request, tmp_path, monkeypatch):
    if request.config.getoption("--real-train") < FULL:
        pytest.skip("runs with --real-train 2000 or more")
    monkeypatch.chdir(tmp_path)  # some draw figures
    namespace: dict[str, Any] = {}
    n_compared = 0
    for block, expected in printed(PROJECT / name):
        capsys.readouterr()
        exec(compile(block.source, name, "exec"), namespace)
        if expected is not None:
            lines = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
            assert lines == [line.rstrip() for line in expected.strip().splitlines()]
            n_compared += 1
    assert n_compared >= 1
