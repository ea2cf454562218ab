"""Top tokens of layers are those of the plain model's head, and people see them as they are."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import D_MODEL, MASKED, N_LAYERS, make_tokenizer, plain_vectors
from paper_a.predictions import COLUMNS, prediction_confidence, prompt_texts, top_predictions
from torch import Tensor

from matlens import LinearMap, MapSet, Readout, collect, make_examples, make_prompts
from matlens.activations.activations import Activations
from matlens.data.corpus import Corpus
from matlens.data.examples import Examples
from matlens.models.identity import Provenance

PROMPTS = {
    False: ["w3 w14 w15 w9 w26", "w5 w35", "w8 w9 w7 w9 w3 w2 w3"],
    True: ["w3 [MASK] w15 w9 w26", "w5 w35 [MASK]", "[MASK] w9 w7 w9 w3"],
}
K = 4


@pytest.fixture
def prompts(small_model):
    """The stream of a model at the positions of its prompts."""

    def read(name: str) -> Activations:
        model = small_model(name)
        return collect(model, make_prompts(model, PROMPTS[name in MASKED]), progress=False)

    return read


def to_last(data: Activations) -> MapSet:
    """Maps from every layer, with no fit behind them."""
    generator = torch.Generator().manual_seed(5)
    maps = [
        LinearMap(torch.randn(D_MODEL, D_MODEL, generator=generator), None, f"h.{layer}", f"h.{N_LAYERS}")
        for layer in range(N_LAYERS)
    ]
    return MapSet(maps, provenance=Provenance(data.provenance.model))


@torch.inference_mode()
def plain_head(name: str, plain: Any, h: Tensor) -> Tensor:
    if name in MASKED:
        return plain.cls(h)
    norm = plain.transformer.ln_f if name == "gpt2" else plain.model.norm
    return plain.lm_head(norm(h))


@pytest.mark.parametrize(
    ("layers", "meant"), [([0, 2, N_LAYERS], [0, 2, 3]), ([-1, 1, -3, 3, -4], [3, 1, 0]), (range(2), [0, 1])]
)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_top_predictions_are_the_largest_of_a_softmax_of_the_plain_models_head(
    name, layers, meant, prompts, small_model, plain_model
):
    plain, tokenizer, data = plain_model(name), make_tokenizer(bert=name in MASKED), prompts(name)
    maps = to_last(data)
    expected = []
    for layer in meant:
        for method in ("id", "mat") if layer < N_LAYERS else ("id",):
            for text in PROMPTS[name in MASKED]:
                tokens = torch.tensor(tokenizer(text)["input_ids"])
                position = (
                    tokens.tolist().index(tokenizer.mask_token_id) if name in MASKED else len(tokens) - 1
                )
                h = plain_vectors(name, plain, tokens)[f"h.{layer}"][0, position]
                if method == "mat":
                    h = maps[layer, N_LAYERS].weight @ h
                top = torch.topk(plain_head(name, plain, h[None])[0].softmax(-1), K)
                for rank, (p, token) in enumerate(zip(*top, strict=True), start=1):
                    expected.append((text, method, layer, rank, tokenizer.decode([token]), float(p)))
    table = top_predictions(Readout(small_model(name)), maps, data, layers, k=K)
    wanted = pd.DataFrame(expected, columns=list(COLUMNS))
    pd.testing.assert_frame_equal(table, wanted, check_exact=False, rtol=1e-4)
    assert table["token"].nunique() > 5, "the layers tell nothing apart"


# What a model has read


def read_by(name: str, small_model: Callable[[str], Any], lines: list[str], **options: Any) -> Any:
    """Texts, beside the positions that they are read at."""
    model = small_model(name)
    examples = make_examples(model, Corpus("lines", tuple(lines), len(lines), 0, 0, 0), **options)
    texts = prompt_texts(Readout(model), Activations({}, examples, "sampled", Provenance()))
    return zip(texts, examples.positions.tolist(), strict=True)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_decoder_has_read_its_sentence_up_to_the_position(name, small_model, sentences):
    lines = list(sentences.sentences)
    seen = set()
    for line, (text, position) in zip(lines, read_by(name, small_model, lines), strict=True):
        assert text == " ".join(line.split()[: position + 1])
        seen.add(len(line.split()) - position)
    assert {1, 2} < seen, "a text that is cut one word late or early would not show"


def test_a_masked_model_has_read_the_whole_sentence_around_its_mask(small_model, sentences):
    """The mask can stand for what the tokenizer adds at the ends, too."""
    lines, seen = list(sentences.sentences), set()
    for seed in range(3):
        for line, (text, at) in zip(lines, read_by("bert", small_model, lines, seed=seed), strict=True):
            whole = ["[CLS]", *line.split(), "[SEP]"]
            seen.add("start" if at == 0 else "end" if at == len(whole) - 1 else "inside")
            whole[at] = "[MASK]"
            assert text == " ".join(word for word in whole if word not in ("[CLS]", "[SEP]"))
    assert seen == {"start", "inside", "end"}


@pytest.mark.parametrize(("position", "text"), [(3, "w0 w1 w2"), (1, "w0"), (0, "[PAD]")])
def test_special_tokens_are_left_out_but_for_the_one_that_is_read(position, text):
    tokenizer = make_tokenizer()
    tokens = np.array(tokenizer.convert_tokens_to_ids(["[PAD]", "w0", "w1", "w2", "[PAD]"]))
    examples = Examples(tokens, np.array([0, 5]), np.array([position]))
    readout: Any = SimpleNamespace(tokenizer=tokenizer)
    assert prompt_texts(readout, Activations({}, examples, "sampled", Provenance())) == [text]


@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma2"])
def test_confidence_is_the_largest_probability_of_the_plain_model(name, small_model, plain_model, sentences):
    examples = make_examples(small_model(name), sentences).head(9)
    expected = []
    for start, end, position in zip(
        examples.offsets[:-1], examples.offsets[1:], examples.positions, strict=True
    ):
        seen = plain_vectors(name, plain_model(name), torch.from_numpy(examples.tokens[start:end]))
        expected.append(float(seen["logits"][0, position].softmax(-1).max()))
    ours = prediction_confidence(small_model(name), examples)
    assert ours.tolist() == pytest.approx(expected, rel=1e-4)
