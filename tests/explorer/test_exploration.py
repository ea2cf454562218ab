"""Pages of prompts and value vectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browsing import Visit, numbers, visiting
from conftest import LAYERS, SPECIAL, WORDS, load_plain, make_sentences, plain_vectors
from injections import INJECTIONS

import matlens
from matlens import ffn, make_examples
from matlens.errors import InputError
from matlens.explorer import explore, write_value_pages
from matlens.explorer.changes import Change, changed_model
from matlens.explorer.exploration import load_lens
from matlens.explorer.usage import shortened
from matlens.patching import Replacement

PROMPT = "w1 w7 w3 w49"
OUTPUTS = {"gpt2": "mlp.c_proj", "gemma2": "mlp.down_proj"}


@pytest.fixture(scope="module")
def explored(small_model, tmp_path_factory):
    """A prompt through id and the maps of a small model, and its page."""
    known: dict[str, Any] = {}

    def make(name: str) -> Any:
        if name not in known:
            model = small_model(name)
            examples = matlens.make_examples(model, make_sentences())
            samples = matlens.collect(model, examples, positions="all", progress=False)
            maps = matlens.MapSet.fit(samples, pairs="last", progress=False)
            exploration = explore(model, PROMPT, [maps], pins=["w5", 9], dominant=6, progress=False)
            path = exploration.save(tmp_path_factory.mktemp("pages") / f"{name}.html")
            known[name] = exploration, maps, path
        return known[name]

    return make


def text(token: int) -> str:
    """How a token of the small models is written; the last rows of their unembeddings are no words."""
    return [*SPECIAL.values(), *WORDS, *(f"<{i}>" for i in range(52, 60))][token]


def by_hand(name: str, folder: Path, maps: matlens.MapSet) -> dict[str, Any]:
    """Distributions of both lenses, in float64 from the plain model: ``[layers, tokens, d_vocab]``."""
    model = load_plain(name, folder)
    tokens = torch.tensor([WORDS.index(word) + 2 for word in PROMPT.split()])
    seen = plain_vectors(name, model, tokens)
    norm, last = model.get_submodule(LAYERS[name][1]), 3
    cap = getattr(model.config, "final_logit_softcapping", None)

    def read(h: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            logits = model.get_output_embeddings()(norm(h)).double()
        return (torch.tanh(logits / cap) * cap if cap else logits).log_softmax(-1)

    layers = [seen[f"h.{layer}"][0] for layer in range(last + 1)]
    mapped = [h if i == last else maps[i, last](h) for i, h in enumerate(layers)]
    return {
        "model": model,
        "seen": seen,
        "id": torch.stack(list(map(read, layers))),
        "mat": torch.stack(list(map(read, mapped))),
    }


@pytest.mark.parametrize("lens", ["id", "mat"])
def test_every_number_of_a_page_is_that_of_the_plain_model(lens, explored, model_folder, browser):
    _, maps, path = explored("gpt2")
    log_q = by_hand("gpt2", model_folder("gpt2"), maps)[lens]
    true = log_q[-1]
    texts = {i: text(i) for i in range(60)}
    best = log_q.topk(10)
    final = true.argmax(-1)
    ranks = 1 + (log_q > log_q.gather(2, final[None, :, None].expand(4, -1, 1))).sum(-1)
    entropy, kl = -(log_q.exp() * log_q).sum(-1), (true.exp() * (true - log_q)).sum(-1)
    pins = [WORDS.index("w5") + 2, 9]
    with visiting(browser, path, fragment=f"#lens={lens}&view=grid") as visit:
        assert visit.page.locator("#lens option").all_inner_texts() == ["mat", "id"]
        grid = visit.page.evaluate(
            "[...document.querySelectorAll('[role=grid] tbody tr')].map(tr => [...tr.querySelectorAll('td')]"
            ".map(td => [td.firstChild.data, td.lastChild.textContent])).reverse()"
        )
        expected = [
            [[texts[int(best.indices[row, column, 0])], str(int(ranks[row, column]))] for column in range(4)]
            for row in range(4)
        ]
        assert grid == expected
        for row in range(4):
            for column in range(4):
                visit.page.click(f"[role=grid] td[data-row='{row}'][data-column='{column}']")
                ten = visit.rows(f".best[data-lens='{lens}']")
                assert [cells[1] for cells in ten] == [texts[int(t)] for t in best.indices[row, column]]
                probabilities = [numbers(cells[2])[0] for cells in ten]
                np.testing.assert_allclose(probabilities, best.values[row, column].exp(), rtol=6e-4)
        visit.page.select_option("#view", "table")
        for column in range(4):
            visit.page.select_option("#position", str(column))
            for row, cells in enumerate(reversed(visit.rows("#table"))):
                shown = [numbers(cell)[0] for cell in cells[2:6]]
                whole = [best.values[row, column, 0].exp(), entropy[row, column], kl[row, column]]
                np.testing.assert_allclose(shown[:3], whole, rtol=6e-4, atol=2e-6)
                assert shown[3] == ranks[row, column]
                for pin, cell in zip(pins, cells[6:], strict=True):
                    rank, probability = numbers(cell)
                    of_pin = log_q[row, column, pin]
                    assert rank == 1 + int((log_q[row, column] > of_pin).sum())
                    np.testing.assert_allclose(probability, of_pin.exp(), rtol=6e-4)
        assert (visit.requests, visit.errors) == ([], [])


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])  # a bias; a norm behind the FFN
def test_sub_updates_of_a_cell_add_up_to_the_ffn_output(name, explored, model_folder, browser):
    _, maps, path = explored(name)
    hand = by_hand(name, model_folder(name), maps)
    model, seen = hand["model"], hand["seen"]
    embedding = model.get_output_embeddings().weight.detach().double()
    pins = [WORDS.index("w5") + 2, 9]
    with visiting(browser, path, fragment="#lens=id&cell=0,0") as visit:
        assert visit.rows("#updates-body") == []
        for layer in range(3):
            block = model.get_submodule(LAYERS[name][0])[layer]
            weight = block.get_submodule(OUTPUTS[name]).weight.detach().double()
            rows = weight if name == "gpt2" else weight.T
            if name == "gemma2":
                rows = rows * (1 + block.post_feedforward_layernorm.weight.detach().double())
            out = seen[f"ffn_out.{layer}"][0].double()
            joined = out if name == "gpt2" else seen[f"ln2_post_out.{layer}"][0].double()
            scale = torch.ones(4) if name == "gpt2" else (out.square().mean(-1) + 1e-6).rsqrt()
            for token in range(4):
                m = scale[token] * seen[f"ffn_post.{layer}"][0, token].double()
                parts = m[:, None] * rows
                lengths = parts.norm(dim=1)
                order = lengths.argsort(descending=True)
                visit.page.evaluate(
                    f"location.hash = 'lens=id&cell={layer + 1},{token}&pins={pins[0]},{pins[1]}'"
                )
                visit.page.wait_for_function(
                    f"document.querySelector('#cell-title').textContent"
                    f".startsWith('Layer {layer + 1}, token {token} ')"
                )
                shown = visit.rows("#updates-body")
                assert [cells[0] for cells in shown[:6]] == [f"L{layer}D{int(i)}" for i in order[:6]]
                coefficients = [numbers(cells[1])[0] for cells in shown[:6]]
                np.testing.assert_allclose(
                    coefficients, seen[f"ffn_post.{layer}"][0, token][order[:6]], rtol=6e-4
                )
                shares = [numbers(cells[2])[0] for cells in shown[:6]]
                np.testing.assert_allclose(shares, (lengths / lengths.sum())[order[:6]], rtol=6e-4)
                for column, pin in enumerate(pins, start=4):
                    effects = [numbers(cells[column])[0] for cells in shown]
                    exact = parts @ embedding[pin]
                    size = float(exact.abs().max())
                    np.testing.assert_allclose(effects[:6], exact[order[:6]], rtol=6e-4, atol=1e-4 * size)
                    whole = float(joined[token] @ embedding[pin])
                    np.testing.assert_allclose(effects[-1], whole, rtol=6e-4, atol=1e-3 * size)
                    np.testing.assert_allclose(sum(effects[:-1]), effects[-1], atol=4e-3 * size)
                for cells, i in zip(shown[:6], order[:6], strict=True):
                    promoted = (embedding @ parts[i]).topk(5).indices
                    assert cells[3].split() == [text(int(t)) for t in promoted]
        assert (visit.requests, visit.errors) == ([], [])


def test_lenses_are_read_from_folders_of_either_kind(explored, small_model, tmp_path):
    _, maps, _ = explored("gpt2")
    maps.save(tmp_path / "maps")
    lens = replace(matlens.Lens.from_maps(maps), method="own")
    lens.save(tmp_path / "lens")
    vectors = torch.randn(2, 32)
    for name, method in (("maps", "mat"), ("lens", "own")):
        read = load_lens(tmp_path / name)
        assert read.method == method
        torch.testing.assert_close(read(vectors, 1), maps[1, 3](vectors))
    both = explore(small_model("gpt2"), "w1", [maps, lens, maps], progress=False)
    assert list(both.lenses) == ["mat", "own", "mat 2", "id"]
    with pytest.raises(InputError, match="folder of type 'lens'"):
        load_lens(tmp_path / "nothing")
    with pytest.raises(InputError, match="model"):
        explore(small_model("gemma2"), "w1", [maps], progress=False)


DIRECTION = torch.randn(32, generator=torch.Generator().manual_seed(4))
CHANGES = {
    "hooks": lambda model: model.hooks(fwd_hooks=[("blocks.0.hook_out", lambda h, hook: h + DIRECTION)]),
    "patched": lambda model: matlens.patched(model, [Replacement(lambda h: h + DIRECTION, 1, 1)]),
    "controlled": lambda model: ffn.controlled(model, {"L0D5": 30.0}),
    "two": lambda model: changed_model(model, [Change("value", "L0D5", 30.0), Change("attn", "2")]),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_changed_model_is_next_to_the_original(kind, small_model, explored):
    model, (plain, maps, _) = small_model("gpt2"), explored("gpt2")
    page = explore(model, PROMPT, [maps], changed=CHANGES[kind](model), dominant=6, progress=False)
    with CHANGES[kind](model):
        inside = explore(model, PROMPT, [maps], progress=False)
    assert (bool(inside.changes), bool(page.modification)) == (True, True)
    assert not page.changes
    assert not plain.changes
    for lens in ("id", "mat"):
        for theirs, ours in (
            (plain.lenses[lens], page.lenses[lens]),
            (inside.lenses[lens], page.modified[lens]),
        ):
            for name in ("ids", "log_probs", "entropy", "kl", "rank"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        assert (page.modified[lens].log_probs != page.lenses[lens].log_probs).any()
    assert inside.updates is not None
    assert plain.updates is not None
    np.testing.assert_array_equal(page.updates.coefficient, plain.updates.coefficient)


def test_both_grids_show_the_plain_models_numbers(small_model, plain_model, explored, browser, tmp_path):
    model, plain, maps = small_model("gpt2"), plain_model("gpt2"), explored("gpt2")[1]
    page = explore(model, PROMPT, [maps], changed=CHANGES["patched"](model), progress=False)
    tokens = torch.tensor([[WORDS.index(word) + 2 for word in PROMPT.split()]])
    texts = {}
    for name, added in (("id", 0), ("id, modified", DIRECTION)):
        edit = plain.transformer.h[0].register_forward_hook(lambda module, given, left, d=added: left + d)
        try:
            seen = plain_vectors("gpt2", plain, tokens)
        finally:
            edit.remove()
        with torch.inference_mode():
            layers = [plain.lm_head(plain.transformer.ln_f(seen[f"h.{layer}"][0])) for layer in range(4)]
        texts[name] = [[text(int(i)) for i in logits.argmax(-1)] for logits in layers]
    path = page.save(tmp_path / "page.html")
    with visiting(browser, path, fragment="#lens=id&compare=id, modified") as visit:
        shown = visit.page.evaluate(
            "[...document.querySelectorAll('[role=grid]')].map(grid => [...grid.querySelectorAll('tbody tr')]"
            ".map(tr => [...tr.querySelectorAll('td')].map(td => td.firstChild.data)).reverse())"
        )
        assert shown == [texts["id"], texts["id, modified"]]
        assert texts["id"] != texts["id, modified"]
        assert "h.1 -> h.1" in visit.page.inner_text("header")
        assert visit.faults() == []
        assert (visit.requests, visit.errors) == ([], [])
    with visiting(browser, path) as visit:  # opens with both
        assert visit.page.locator("#grids h2").all_inner_texts() == ["mat", "mat, modified"]


def test_a_page_inside_a_jump_over_one_block_has_no_sub_updates(small_model):
    model = small_model("gpt2")
    with matlens.patched(model, [Replacement(lambda h: h, 1, 2)]):
        page = explore(model, PROMPT, progress=False)
    assert list(page.layers) == [0, 1, 2, 3]
    assert page.updates is None


def test_layers_that_are_skipped_are_empty(small_model, explored, browser, tmp_path):
    model, maps = small_model("gpt2"), explored("gpt2")[1]
    jump = [Replacement(lambda h: h, 0, 3)]
    page = explore(model, PROMPT, [maps], changed=matlens.patched(model, jump), progress=False)
    for cells in page.modified.values():
        assert np.isnan(cells.kl).all(1).tolist() == [False, True, True, False]
        assert not (cells.rank[[0, 3]] == 0).any()
    with matlens.patched(model, jump):
        inside = explore(model, PROMPT, [maps], progress=False)
    assert list(inside.layers) == [0, 3]
    assert inside.updates is None
    for name, cells in inside.lenses.items():
        np.testing.assert_array_equal(page.modified[name].ids[[0, 3]], cells.ids)
    path = page.save(tmp_path / "page.html")
    with visiting(browser, path, fragment="#lens=id&compare=id, modified") as visit:
        for view in ("grid", "difference", "table"):
            visit.page.select_option("#view", view)
            for color in visit.page.locator("#color option").all():
                visit.page.select_option("#color", color.get_attribute("value"))
        skipped = visit.rows("#table > div:last-child")[1]
        assert {cell.strip() for cell in skipped[1:]} <= {"", "–", "– (–)"}
        visit.page.select_option("#view", "grid")
        visit.page.locator("[role=grid]").nth(1).locator("td[data-row='1']").first.click()
        assert "NaN" not in visit.page.inner_text("main")
        assert visit.faults() == []
        assert (visit.requests, visit.errors) == ([], [])


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


def test_long_sentences_are_truncated(small_model):
    examples = make_examples(small_model("gpt2"), make_sentences())
    cut = shortened(examples, 7)
    assert cut.lengths.tolist() == np.minimum(examples.lengths, 7).tolist()
    for i in range(len(examples)):
        whole = examples.tokens[examples.offsets[i] :][: cut.lengths[i]]
        assert cut.tokens[cut.offsets[i] : cut.offsets[i + 1]].tolist() == whole.tolist()
    assert cut.positions.tolist() == (cut.lengths - 1).tolist()
