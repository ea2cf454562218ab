"""A prompt explored: every number in the page is the library's, and sub-updates add up to what FFNs write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browsing import numbers, visiting
from conftest import LAYERS, SPECIAL, WORDS, load_plain, make_sentences, plain_vectors

import matlens
from matlens.errors import InputError
from matlens.explorer import explore
from matlens.explorer.exploration import load_lens

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
