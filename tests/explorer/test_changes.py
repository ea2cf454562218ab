"""Changes of a model do what `patched` does with the same maps, and continuations are greedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_sentences

import matlens
from matlens import InputError, MapSet
from matlens.explorer.changes import Change, compare_changes, offered_maps
from matlens.models.layout import ModelLayout
from matlens.patching import fit_submodules, mat_attn, mat_ffn, mat_ln1_ln2, submodule_pairs

PROMPT = "w1 w2 w9"


@pytest.fixture(scope="module")
def fitted(small_model):
    """A model, maps onto its last layers, and maps of its sub-modules in the first two blocks."""
    model = small_model("llama")
    examples = matlens.make_examples(model, make_sentences())
    pairs = [pair for pair in submodule_pairs(ModelLayout.from_model(model)) if not pair[0].endswith(".2")]
    sites = [0, 1, 3, *(site for pair in pairs for site in pair)]
    samples = matlens.collect(model, examples, sites, positions="all", progress=False)
    jumps = MapSet.fit(samples, pairs=[(0, 3), (1, 3), (0, 1)], progress=False)
    return model, jumps, MapSet(list(fit_submodules(samples, pairs, progress=False)))


def by_hand(model: Any, replacements: Any) -> list[float]:
    tokens = model.to_tokens(PROMPT)
    with torch.inference_mode(), matlens.patched(model, replacements):
        return model(tokens, return_type="logits")[0, -1].softmax(-1).topk(10).values.tolist()


def test_offers_are_the_maps_of_the_sets(fitted):
    _, jumps, inside = fitted
    assert offered_maps([]) == {"mat": [], "mat_attn": [], "mat_ffn": [], "mat_ln1_ln2": []}
    offers = offered_maps([jumps, inside])
    assert sorted(offers.pop("mat")) == ["0-1", "0-3", "1-3"]
    assert offers == {kind: ["0", "1"] for kind in ("mat_attn", "mat_ffn", "mat_ln1_ln2")}


@pytest.mark.parametrize(
    ("kind", "target", "make"),
    [
        ("mat", "1-3", lambda jumps, inside: [matlens.jump(jumps, 1, 3)]),
        ("mat_attn", "1", lambda jumps, inside: [mat_attn(inside, 1, 2)]),
        ("mat_ffn", "0-2", lambda jumps, inside: [mat_ffn(inside, 0, 2)]),
        ("mat_ln1_ln2", "0", lambda jumps, inside: [mat_ln1_ln2(inside, 0, 1)]),
    ],
)
def test_changes_by_maps_equal_patches_by_hand(kind, target, make, fitted):
    model, jumps, inside = fitted
    expected = by_hand(model, [one for replacements in make(jumps, inside) for one in replacements])
    before, after = compare_changes(model, PROMPT, [Change(kind, target)], maps=[jumps, inside], n_tokens=1)
    torch.testing.assert_close(torch.tensor([p for _, p in after.tokens]), torch.tensor(expected))
    assert before.tokens != after.tokens


@torch.inference_mode()
def test_continuations_are_greedy_whatever_the_generation_config_says(model_folder, plain_model):
    model, plain = matlens.load(str(model_folder("llama")), device="cpu"), plain_model("llama")
    ids = model.tokenizer(PROMPT)["input_ids"]
    end = int(plain(torch.tensor([ids])).logits[0, -1].argmax())
    config = model.original_model.generation_config
    config.eos_token_id, config.repetition_penalty, config.do_sample = end, 5.0, True
    config.no_repeat_ngram_size, config.num_beams, config.max_length = 1, 3, 5
    expected = list(ids)
    for _ in range(8):
        logits = plain(torch.tensor([expected])).logits[0, -1]
        logits[end] = -torch.inf
        expected.append(int(logits.argmax()))
    before, _ = compare_changes(model, PROMPT, [Change("jump", "0-1")], n_tokens=8)
    assert before.continuation == model.tokenizer.decode(expected[len(ids) :])
    with pytest.raises(InputError, match=r"^prompt must have 1 to 40 tokens.*got 41"):
        compare_changes(model, "w1 " * 41, [], n_tokens=8)
