"""A text has the vectors that it has alone, whatever else a model with scaled rotary embeddings reads."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from conftest import N_LAYERS, assert_near, make_tokenizer
from torch import Tensor

import matlens
from matlens.activations.collecting import stream
from matlens.ffn import text_losses
from matlens.models import Site
from matlens.patching import Replacement, Variant, run_variants

CONTEXT, SHORT = 40, 12  # longest text, and longest text of the original training
SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": N_LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": CONTEXT,
    "pad_token_id": 1, "bos_token_id": None, "eos_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SHORT,
    "short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [3.0, 2.0, 4.0, 5.0],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
CONFIGS = {
    "phi3": lambda: transformers.Phi3Config(
        **SIZES, original_max_position_embeddings=SHORT, rope_parameters=LONGROPE
    ),
    "llama": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LONGROPE),
    "llama-dynamic": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=DYNAMIC),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, sliding_window=16, layer_types=["sliding_attention", *["full_attention"] * (N_LAYERS - 1)],
        rope_parameters={"full_attention": LONGROPE, "sliding_attention": DEFAULT},
    ),
    "gemma3-dynamic": lambda: transformers.Gemma3TextConfig(
        **SIZES, sliding_window=16, layer_types=["sliding_attention", *["full_attention"] * (N_LAYERS - 1)],
        rope_parameters={"full_attention": DYNAMIC, "sliding_attention": DEFAULT},
    ),
}  # fmt: skip
LENGTHS = (20, 6, 12, 13, 3, 40)
IDS = [[3 + (7 * n + k * k) % 57 for k in range(n)] for n in LENGTHS]


@pytest.fixture(scope="module", params=CONFIGS)
def models(request, tmp_path_factory) -> tuple[Any, Any]:
    """A small model, and the plain model of the same weights, which has read nothing yet."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    plain.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return matlens.load(folder, device="cpu"), plain


def alone(plain: Any, ids: Sequence[int]) -> Any:
    """Outputs of a model that has read nothing before."""
    with torch.no_grad():
        return deepcopy(plain)(input_ids=torch.tensor([ids]), output_hidden_states=True)


@pytest.fixture(scope="module")
def separate(models) -> tuple[list[Tensor], list[Tensor]]:
    """Vectors of layer 2 and logits of each text, read alone."""
    outputs = [alone(models[1], ids) for ids in IDS]
    return [out.hidden_states[2][0] for out in outputs], [out.logits[0] for out in outputs]


def examples_of(model: Any, positions: Sequence[Sequence[int]]) -> Any:
    return matlens.make_token_examples(model, IDS, positions=[list(row) for row in positions])


@pytest.mark.parametrize("batch_tokens", [7, 60, 1000])
def test_vectors_are_those_of_each_text_alone(batch_tokens, models, separate):
    model, vectors = models[0], separate[0]
    examples = examples_of(model, [range(n) for n in LENGTHS])
    ours = matlens.collect(model, examples, [2], batch_tokens=batch_tokens, progress=False)[2]
    assert_near(ours, torch.cat(vectors))


def test_sampled_positions_have_the_vectors_of_whole_texts(models, separate):
    model, vectors = models[0], separate[0]
    at = [n // 3 for n in LENGTHS]
    rows = torch.stack([h[place] for h, place in zip(vectors, at, strict=True)])
    examples = examples_of(model, [[place] for place in at])
    assert_near(matlens.collect(model, examples, [2], progress=False)[2], rows)
    streamed = torch.zeros_like(rows)
    for batch in stream(model, examples, [2], batch_tokens=60, progress=False):
        streamed[batch.index] = batch.vectors["h.2"]
    assert_near(streamed, rows)


def test_losses_of_texts_do_not_depend_on_their_batch(models, separate):
    expected = [
        -float(logits[:-1].log_softmax(-1)[range(len(ids) - 1), ids[1:]].sum())
        for logits, ids in zip(separate[1], IDS, strict=True)
    ]
    examples = examples_of(models[0], [[0]] * len(IDS))
    total = text_losses(models[0], examples, batch_tokens=1000, progress=False).total
    assert_near(torch.from_numpy(total), torch.tensor(expected).double())


def test_patched_variants_do_not_depend_on_their_batch(models):
    model = models[0]
    source, target = Site("h", 1), Site("h", 2)
    variant = Variant(1, [Replacement(lambda h: 2 * h, source, target)])
    examples = examples_of(model, [[n // 2] for n in LENGTHS])
    together, one_by_one = (
        run_variants(model, examples, {"jump": variant}, batch_tokens=tokens, progress=False)["jump"][:]
        for tokens in (1000, 1)
    )
    assert_near(together, one_by_one)


def test_a_longer_input_before_changes_nothing(models, separate):
    """Inputs past the context too, which dynamic scaling remembers in transformers."""
    model = models[0]
    with torch.no_grad():
        model(torch.tensor([[5] * 70]))
    examples = examples_of(model, [range(n) for n in LENGTHS])
    assert_near(matlens.collect(model, examples, [2], progress=False)[2], torch.cat(separate[0]))
    first, second = (alone(models[1], [9] * n).logits for n in (60, 50))
    with torch.no_grad():
        for ids, expected in (([9] * 60, first), ([9] * 50, second), ([9] * 60, first)):
            assert_near(model(torch.tensor([ids])), expected)


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_is_that_of_a_fresh_plain_model(use_cache, models):
    """Across both limits, after an input that was longer."""
    prompt, options = torch.tensor([IDS[1]]), {"max_new_tokens": 45, "do_sample": False}
    expected = deepcopy(models[1]).generate(prompt, use_cache=use_cache, eos_token_id=None, **options)
    with torch.no_grad():
        models[0](torch.tensor([[5] * 70]))
        ours = models[0].original_model.generate(prompt, use_cache=use_cache, eos_token_id=None, **options)
    assert ours.tolist() == expected.tolist()
