"""All methods by one call: closed forms first, and each trained one from where it should start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import D_MODEL, N_LAYERS, make_sentences

import matlens
from matlens import InputError, Lens, Readout
from matlens.data.corpus import Corpus
from matlens.lens.jacobian import fit_jacobian, longest_sentences
from matlens.lens.methods import Method
from matlens.lens.trained import (
    best_start,
    check_method_names,
    closed_forms,
    fit_maps,
    sites_of_rows,
    train_maps,
)
from matlens.lens.training import polish, scale_map, tune
from matlens.models.identity import ModelIdentity

Models = Callable[[str], Any]
NAMES = ["tuned", "mat", "polished", "scaled"]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return make_sentences().split(n_train=12, n_validation=2)[0]


@pytest.fixture(scope="module")
def model(small_model: Models) -> Any:
    return small_model("llama")


@pytest.fixture(scope="module")
def rows(model: Any, corpus: Corpus) -> Any:
    """The stream at all tokens of the corpus."""
    examples = matlens.make_examples(model, corpus)
    return matlens.collect(model, examples, positions="all", progress=False)


@pytest.fixture(scope="module")
def lenses(model: Any, corpus: Corpus) -> dict[str, Lens]:
    return Lens.fit(model, corpus, method=NAMES, layers=[1], progress=False)


def test_a_corpus_gives_every_method_what_its_rows_give(
    model: Any, corpus: Corpus, rows: Any, lenses: dict[str, Lens]
) -> None:
    readout, h, last = Readout(model), rows[1], rows[N_LAYERS]
    start = Lens.fit(model, rows, method="normed+affine", layers=[1], progress=False)
    expected = {
        "polished": polish(readout, start.maps[1], h, last, norm=start.norm),
        "scaled": scale_map(readout, start.maps[1], h, last, norm=start.norm),
        "tuned": tune(readout, h, last),
        "mat": Lens.fit(model, rows, method="mat", progress=False).maps[1],
    }
    assert list(lenses) == NAMES
    for name, held in expected.items():
        ours = lenses[name]
        torch.testing.assert_close(ours.maps[1].matrix(D_MODEL), held.matrix(D_MODEL), rtol=1e-3, atol=1e-4)
        assert ours.maps[1].scale == pytest.approx(held.scale, rel=1e-3)
        assert (ours.method, ours.layers) == (name, (1,))
        assert ours.norm == (start.norm if name in ("polished", "scaled") else None)
        assert ours.provenance.corpus == corpus.name
        assert ours.n_samples == len(h)
        assert ours.logits(h[:2], 1).shape == (2, model.cfg.d_vocab)
    assert lenses["polished"].provenance.details["seed"] == 0


def test_one_name_gives_one_lens_and_rows_may_lie_on_disk(
    model: Any, corpus: Corpus, lenses: dict[str, Lens], tmp_path: Any
) -> None:
    lens = Lens.fit(model, corpus, method="polished", layers=[1], folder=tmp_path / "rows", progress=False)
    h = torch.randn(3, D_MODEL, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(lens(h, 1), lenses["polished"](h, 1))
    assert (tmp_path / "rows" / "config.json").exists()
    lens.save(tmp_path / "lens")
    assert Lens.load(tmp_path / "lens", model).method == "polished"


def test_a_jacobian_lens_is_taken_on_the_longest_sentences(model: Any) -> None:
    longest = longest_sentences(make_sentences(), 2)
    lengths = sorted(len(text.split()) for text in make_sentences().sentences)
    assert [len(text.split()) for text in longest] == lengths[:-3:-1]
    lens = Lens.fit(model, make_sentences(), method="jacobian", layers=[0, 2], n_prompts=2, progress=False)
    expected = fit_jacobian(model, longest, layers=[2], progress=False)
    assert lens.layers == (2,)
    torch.testing.assert_close(lens.maps[2].matrix(D_MODEL), expected.maps[2].matrix(D_MODEL))
    assert lens.provenance.corpus == "words"


def test_a_masked_model_starts_from_vectors_as_they_are(small_model: Models, corpus: Corpus) -> None:
    model = small_model("bert")
    assert best_start(model) == "affine"
    lens = Lens.fit(model, corpus, method="polished", positions="drawn", layers=[1], progress=False)
    assert lens.norm is None
    assert lens.n_samples == len(corpus)
    assert lens.provenance.positions == "drawn"


def test_what_methods_need_is_known_from_their_names(model: Any) -> None:
    assert closed_forms(["tuned", "mat", "jacobian"], model) == ["mat"]
    assert closed_forms(["polished", "scaled"], model) == ["normed+affine"]
    assert closed_forms(["normed+affine", "scaled"], model) == ["normed+affine"]
    assert sites_of_rows(["mat", "tuned"], [2], 3) == [2, 3]
    assert sites_of_rows(["mat without sinks", "tuned"], [2], 3) == [0, 1, 2, 3]
    assert sites_of_rows(["tuned"], None, 3) == [0, 1, 2, 3]
    assert all(Method.parse(name).sinks for name in closed_forms(["polished"], model))


@pytest.mark.refused
def test_what_cannot_be_trained_is_refused(small_model: Models, model: Any, rows: Any, corpus: Any) -> None:
    with pytest.raises(InputError, match="Or one of scaled, polished, tuned, jacobian"):
        check_method_names(["mat", "trained"])
    with pytest.raises(InputError, match="No methods"):
        check_method_names([])
    with pytest.raises(InputError, match="starts from a closed form"):
        train_maps("polished", Readout(model), rows)
    with pytest.raises(InputError, match="one of scaled, polished, tuned"):
        train_maps("mat", Readout(model), rows)
    with pytest.raises(InputError, match="Expected a corpus"):
        fit_maps(model, rows, ["jacobian"])
    with pytest.raises(InputError, match="do not belong"):
        Lens.fit(small_model("gpt2"), rows, method="tuned")
    few = matlens.collect(model, rows.examples, [1], progress=False)
    with pytest.raises(InputError, match="lack"):
        Lens.fit(model, few, method="tuned")
    assert ModelIdentity.from_model(model) == rows.provenance.identity


def test_a_folder_into_which_nothing_would_be_written_is_refused(
    model: Any, corpus: Corpus, tmp_path: Any
) -> None:
    with pytest.raises(InputError, match="keeps no vectors"):
        Lens.fit(model, corpus, method=["mat", "affine"], folder=tmp_path / "rows")
    assert not (tmp_path / "rows").exists()
