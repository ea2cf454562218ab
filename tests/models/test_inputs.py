"""The two stacks of an encoder-decoder against the plain model, hooked and patched by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from conftest import N_LAYERS, WORDS, assert_near, listening, make_sentences
from patched_models import patched
from torch import Tensor

import matlens
from matlens import InputError, MapSet, Readout
from matlens.data.examples import Examples
from matlens.models.layout import ModelLayout

SOURCES = [" ".join(WORDS[(3 * i + j) % 50] for j in range(4 + i)) for i in range(5)]
TARGETS = [" ".join(WORDS[(7 * i + 2 * j) % 50] for j in range(8 - i)) for i in range(5)]
LAYERS = {"encoder": N_LAYERS, "decoder": 2}


def _ends(name: str, path: str) -> dict[str, tuple[str, str]]:
    return {f"{name}_in": (path, "in"), f"{name}_out": (path, "out")}


# By hand, from the source of T5: which module of a block has a site as its input or output.
_SELF = _ends("ln1", "layer.0.layer_norm") | _ends("attn", "layer.0.SelfAttention")
MODULES = {
    "encoder": {
        **_SELF, **_ends("ln2", "layer.1.layer_norm"), **_ends("ffn", "layer.1.DenseReluDense"),
        "mid": ("layer.1.layer_norm", "in"), "ffn_post": ("layer.1.DenseReluDense.wo", "in"),
    },
    "decoder": {
        **_SELF, **_ends("ln_cross", "layer.1.layer_norm"), **_ends("cross", "layer.1.EncDecAttention"),
        **_ends("ln2", "layer.2.layer_norm"), **_ends("ffn", "layer.2.DenseReluDense"),
        "mid_cross": ("layer.1.layer_norm", "in"), "mid": ("layer.2.layer_norm", "in"),
        "ffn_post": ("layer.2.DenseReluDense.wo", "in"),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def stacks(model_folder):
    return {name: matlens.load(str(model_folder("t5")), device="cpu", stack=name) for name in LAYERS}


@pytest.fixture(scope="module")
def plain(model_folder):
    return transformers.T5ForConditionalGeneration.from_pretrained(model_folder("t5")).eval()


def examples_of(name: str, model: Any) -> Examples:
    if name == "encoder":
        return matlens.make_prompts(model, SOURCES)
    return matlens.data.make_pairs(model, SOURCES, TARGETS)


def sentence_of(examples: Examples, number: int) -> tuple[Tensor, Tensor]:
    """The source and what the decoder reads; of an encoder's examples the text and the start token."""
    tokens = torch.from_numpy(examples.tokens[examples.offsets[number] : examples.offsets[number + 1]])[None]
    if not examples.has_sources:
        return tokens, torch.zeros(1, 1, dtype=torch.long)
    start, end = examples.source_offsets[number : number + 2]
    return torch.from_numpy(examples.source_tokens[start:end])[None], tokens


@torch.inference_mode()
def plain_vectors(name: str, plain: Any, source: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Vectors of every site, ``[length, d]``, and the logits, of one sentence without padding."""
    stack = getattr(plain, name)
    with listening(stack.block, stack.final_layer_norm, MODULES[name]) as seen:
        seen["logits"] = plain(source, decoder_input_ids=target).logits
    return {site: value[0] for site, value in seen.items()}


@pytest.mark.parametrize("name", LAYERS)
def test_sites_are_the_plain_models_and_add_up(name, stacks, plain):
    """In padded batches of sources and targets of different lengths, as in each pair alone."""
    model = stacks[name]
    known, examples = ModelLayout.from_model(model), examples_of(name, model)
    assert known.wiring.name == {"encoder": "pre-norm", "decoder": "cross-attention"}[name]
    assert (known.n_layers, set(known.kinds), known.d_mlp) == (LAYERS[name], set(MODULES[name]), 48)
    collected = matlens.collect(model, examples, known.sites, positions="all", progress=False)
    for number in range(len(examples)):
        theirs = plain_vectors(name, plain, *sentence_of(examples, number))
        for site in known.sites:
            ours = collected[site][examples.offsets[number] : examples.offsets[number + 1]]
            assert_near(ours, theirs[str(site)])
        if name == "decoder":
            span = slice(*examples.offsets[number : number + 2])
            last = collected[f"h.{known.n_layers}"][span]
            assert_near(Readout(model).logits(last), theirs["logits"])


def test_what_does_not_belong_together_is_refused(stacks, model_folder):
    encoder, decoder = stacks["encoder"], stacks["decoder"]
    folder = str(model_folder("t5"))
    with pytest.raises(InputError, match=r"stack must be 'encoder' or 'decoder' for .* a t5"):
        matlens.load(folder, device="cpu")
    with pytest.raises(InputError, match="stack must be None"):
        matlens.load(str(model_folder("gpt2")), device="cpu", stack="encoder")
    with pytest.raises(InputError, match="An encoder has no readout"):
        Readout(encoder)
    with pytest.raises(InputError, match=r"a corpus has no sources for it\. Use matlens.data.make_pa"):
        matlens.make_examples(decoder, make_sentences())
    with pytest.raises(InputError, match="the examples have no source for it"):
        matlens.collect(decoder, matlens.make_token_examples(decoder, [[0, 4, 5]]), progress=False)
    with pytest.raises(InputError, match=r"^sources must have 2 entries"):
        matlens.make_token_examples(decoder, [[0, 4], [0, 5]], sources=[[7, 8]])
    with pytest.raises(InputError, match=r"^sources must be None"):
        matlens.make_token_examples(encoder, [[0, 4]], sources=[[7, 8]])
    collected = matlens.collect(encoder, examples_of("encoder", encoder), progress=False)
    maps = MapSet.fit(collected, pairs=[(0, 2)])
    with pytest.raises(InputError):
        patched(decoder, maps.values()).__enter__()
    with pytest.raises(InputError, match="stack must be 'encoder' for this bridge"):
        matlens.wrap(encoder, stack="decoder")
