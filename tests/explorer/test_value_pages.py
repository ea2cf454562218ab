"""The pages of value vectors show what the library and the plain model compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from browsing import Visit, numbers, visiting
from conftest import SPECIAL, WORDS, make_sentences, plain_vectors
from injections import INJECTIONS

from matlens import ffn
from matlens.errors import InputError
from matlens.explorer import write_value_pages

N_CLUSTERS = 12
TEXTS = [*SPECIAL.values(), *WORDS, *(f"<{i}>" for i in range(52, 60))]


@pytest.fixture(scope="module")
def clusters(small_model):
    return ffn.Clusters.fit(ffn.ValueVectors(small_model("llama")), N_CLUSTERS, progress=False)


@pytest.fixture(scope="module")
def site(small_model, clusters, tmp_path_factory):
    folder = tmp_path_factory.mktemp("values") / "site"
    return write_value_pages(
        small_model("llama"), folder, corpus=make_sentences(), clusters=clusters, neighbors=4, progress=False
    )  # fmt: skip


@pytest.fixture(scope="module")
def open_site(browser, site):
    with visiting(browser, site) as visit:
        yield visit


@pytest.fixture
def visit(open_site):
    yield open_site
    assert (open_site.requests, open_site.errors) == ([], [])


def go(visit: Visit, fragment: str, selector: str) -> None:
    visit.page.evaluate(f"location.hash = '{fragment}'")
    visit.page.wait_for_selector(selector)


def show(visit: Visit, name: str) -> None:
    go(visit, name, f"#vector-name:text-is('{name}')")


@pytest.mark.parametrize("name", ["L0D0", "L2D47"])
def test_a_vector_has_its_tokens_by_both_readings_and_its_neighbors(name, visit, small_model, clusters):
    model = small_model("llama").original_model
    rows = [layer.mlp.down_proj.weight.detach().double().T for layer in model.model.layers]
    layer, index = (int(part) for part in name[1:].split("D"))
    vector = rows[layer][index]
    normed = (
        vector
        / (vector.square().mean() + model.config.rms_norm_eps).sqrt()
        * model.model.norm.weight.double()
    )
    show(visit, name)
    for reading, read in (("plain", vector), ("norm", normed)):
        scores = (model.lm_head.weight.double() @ read).detach()
        for side in ("top", "bottom"):
            best = scores.topk(10, largest=side == "top")
            shown = visit.rows(f"[data-list='{reading} {side}']")
            assert [cells[1] for cells in shown] == [TEXTS[int(i)] for i in best.indices]
            np.testing.assert_allclose([numbers(cells[2])[0] for cells in shown], best.values, rtol=6e-4)
    every = torch.nn.functional.normalize(torch.cat(rows), dim=1)
    cosines = every @ every[48 * layer + index]
    best = cosines.topk(5)
    shown = visit.rows("[data-list='neighbors']")
    assert [cells[0] for cells in shown] == [f"L{int(i) // 48}D{int(i) % 48}" for i in best.indices[1:]]
    np.testing.assert_allclose([numbers(cells[1])[0] for cells in shown], best.values[1:], rtol=6e-4)
    facts = visit.page.inner_text("#vector p")
    np.testing.assert_allclose(numbers(facts)[0], vector.norm(), rtol=6e-4)
    assert facts.endswith(f"cluster {clusters.labels[48 * layer + index]}")


@pytest.fixture(scope="module")
def coefficients(plain_model):
    """Of every sentence, by the plain model: ``[layers, length, d_mlp]``."""
    found = []
    for sentence in make_sentences().sentences:
        tokens = torch.tensor([WORDS.index(word) + 2 for word in sentence.split()])
        seen = plain_vectors("llama", plain_model("llama"), tokens)
        found.append(torch.stack([seen[f"ffn_post.{layer}"][0] for layer in range(3)]))
    return found


@pytest.mark.parametrize("name", ["L0D3", "L2D40"])
def test_a_vector_has_the_sentences_of_its_largest_coefficients(name, visit, coefficients, plain_model):
    layer, index = (int(part) for part in name[1:].split("D"))
    peaks = torch.stack([m[layer, 1:, index].max() for m in coefficients])
    best = peaks.topk(5)
    show(visit, name)
    shown = visit.page.evaluate(
        "[...document.querySelectorAll('.sentence')].map(p => [p.firstChild.textContent,"
        "[...p.querySelectorAll('bdi')].map(e => [e.textContent, e.title, e.className])])"
    )
    assert len(shown) == 5
    for (peak, words), value, sentence in zip(shown, best.values, best.indices, strict=True):
        np.testing.assert_allclose(numbers(peak)[0], value, rtol=6e-4)
        assert [word for word, *_ in words] == make_sentences().sentences[int(sentence)].split()
        exact = coefficients[int(sentence)][layer, :, index]
        step = float(value.abs()) / 127
        np.testing.assert_allclose(
            [numbers(title)[0] for _, title, _ in words],
            exact.clamp(-127 * step, 127 * step),
            atol=0.52 * step,
        )
        assert all(
            ("less" in color) == (m < -0.5 * step) for m, (*_, color) in zip(exact, words, strict=True)
        )
    rows = plain_model("llama").model.layers[layer].mlp.down_proj.weight.T
    counted = torch.cat([m[layer, 1:] for m in coefficients])
    dominant = (counted.abs() * rows.norm(dim=1)).topk(10).indices
    share = (dominant == index).any(1).double().mean()
    np.testing.assert_allclose(numbers(visit.page.inner_text("#vector p"))[1], share, rtol=6e-4, atol=1e-9)


def test_vectors_are_found_by_token_name_layer_and_cluster(visit, small_model, clusters):
    model = small_model("llama")
    values, projection = ffn.ValueVectors(model), ffn.Projection.from_model(model)
    tokens = projection.top_of_all(values, 30, progress=False)
    expected = projection.search(values, tokens, ["w7"])
    visit.page.fill("#query", "w7")
    visit.page.keyboard.press("Enter")
    visit.page.click(".choices bdi:text-is('w7')")
    visit.page.wait_for_selector("#results table")
    names = [cells[0] for cells in visit.rows("#results")]
    hits = expected.assign(row=expected["layer"] * 48 + expected["index"]).sort_values(["rank", "row"])
    assert names == hits["value"].tolist()[:60]
    assert f"{len(hits)} value vectors" in visit.page.inner_text("#said")
    visit.page.fill("#query", "layer 1")
    visit.page.keyboard.press("Enter")
    visit.page.wait_for_selector("#results table")
    assert [cells[0] for cells in visit.rows("#results")] == [f"L1D{i}" for i in range(48)]
    top = [TEXTS[int(i)] for i in tokens.ids[48, :5]]
    assert visit.rows("#results")[0][1].split() == top
    go(visit, "cluster=3", "#results caption, #results table")
    members = [str(values.at(int(row))) for row in clusters.members(3)]
    assert [cells[0] for cells in visit.rows("#results")] == members
    go(visit, "word=no such token", "#said:has-text('No tokens contain')")
    go(visit, "L9D1", "#said:has-text('Nothing found')")


def test_no_fault_is_seen_by_axe(visit):
    for fragment, selector in (("L1D12", "#vector-name"), ("layer=0", "#results table")):
        go(visit, fragment, selector)
        assert visit.faults() == []


def test_foreign_tokens_are_shown_as_text(browser, small_model, tmp_path, monkeypatch):
    texts = 2 * [text for text in INJECTIONS if not text.startswith("\ud800")]
    texts = texts[:60]  # as many as tokens
    monkeypatch.setattr("matlens.explorer.value_pages._Pages._texts", lambda pages: texts)
    page = write_value_pages(
        small_model("llama"),
        tmp_path / "site",
        corpus=make_sentences(),
        neighbors=2,
        progress=False,
    )
    with visiting(browser, page, fragment="#L0D1") as visit:
        for row in range(0, 144, 36):
            show(visit, f"L{row // 48}D{row % 48}")
            shown = [cells[1] for cells in visit.rows("[data-list='plain top']")]
            assert set(shown) <= set(texts)
        for text in texts[:12]:
            visit.page.fill("#query", text)
            visit.page.keyboard.press("Enter")
        assert visit.page.evaluate("window.obeyed") is None
        assert visit.page.evaluate("document.querySelectorAll('img, iframe, object, svg').length") == 0
        assert (visit.requests, visit.errors) == ([], [])


def test_neighbors_and_clusters_of_another_model_are_refused(small_model, clusters, tmp_path):
    for options, message in (({"neighbors": 144}, "^neighbors must be"), ({"clusters": clusters}, "model")):
        model = small_model("llama" if "neighbors" in options else "gpt2")
        with pytest.raises(InputError, match=message):
            write_value_pages(model, tmp_path / "site", progress=False, **options)
    assert not (tmp_path / "site").exists()
