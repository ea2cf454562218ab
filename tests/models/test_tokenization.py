"""How text becomes tokens is one policy: the bridge's own, seen in the identity and used for examples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WORDS, assert_near, make_sentences, make_tokenizer, save_with_ends
from tokenizers import normalizers
from transformer_lens.model_bridge import TransformerBridge

import matlens
from matlens import InputError, MapSet
from matlens.data import Corpus
from matlens.models import ModelIdentity, token_policy
from matlens.models.tokens import encode_text

TEXT = " ".join(WORDS[:6])


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("front", [False, True])
def test_a_loaded_model_reads_what_its_tokenizer_makes(front: bool, end: bool, tmp_path: Path) -> None:
    model = matlens.load(str(save_with_ends(tmp_path / "model", front=front, end=end)), device="cpu")
    own = model.tokenizer(TEXT)["input_ids"]
    assert encode_text(model, TEXT).ids == own == model.to_tokens(TEXT)[0].tolist()
    assert encode_text(model, TEXT).added == [True] * front + [False] * 6 + [True] * end
    assert encode_text(model, TEXT, longest=4).ids[:2] == own[:2]
    assert len(encode_text(model, TEXT, longest=4).ids) == 4
    words = [*["'w49' in front"] * front, *["'w48' at the end"] * end]
    assert token_policy(model).words == (" and ".join(words) or "nothing added")


@pytest.mark.parametrize("prepend", [False, True])
@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("front", [False, True])
def test_a_bridge_booted_elsewhere_is_followed(front: bool, end: bool, prepend: bool, tmp_path: Path) -> None:
    """Whatever the bridge itself reads is what examples are made of."""
    folder = save_with_ends(tmp_path / "model", front=front, end=end)
    bridge = TransformerBridge.boot_transformers(str(folder), device="cpu")
    bridge.cfg.default_prepend_bos = prepend
    read = bridge.to_tokens(TEXT)[0].tolist()
    assert read == [51] * prepend + make_tokenizer()(TEXT)["input_ids"]
    assert encode_text(bridge, TEXT).ids == read
    assert encode_text(bridge, TEXT).added == [True] * prepend + [False] * 6
    examples = matlens.make_examples(bridge, Corpus("one", (TEXT,), 1, 0, 0, 0), draw_special=False)
    assert examples.tokens.tolist() == read
    assert examples.positions[0] >= prepend
    assert matlens.make_prompts(bridge, [TEXT]).tokens.tolist() == read


def test_the_digest_tells_policies_and_vocabularies_apart(tmp_path: Path) -> None:
    folder = save_with_ends(tmp_path / "model")
    model = matlens.load(str(folder), device="cpu")
    first = token_policy(model)
    assert first == token_policy(matlens.load(str(folder), device="cpu"))
    assert ModelIdentity.from_model(model).tokens == first.digest
    model.cfg.default_prepend_bos = True
    assert token_policy(model).digest != first.digest
    model.cfg.default_prepend_bos = False
    assert token_policy(model) == first
    model(TEXT, return_type=None)
    model.to_tokens([TEXT, "w1"])  # padding is no part of the policy
    assert token_policy(model) == first

    # Two words change places, neither of them in any text that is probed.
    shutil.copytree(folder, tmp_path / "other")
    read = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = read["model"]["vocab"]
    vocabulary["w7"], vocabulary["w9"] = vocabulary["w9"], vocabulary["w7"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(read))
    other = matlens.load(str(tmp_path / "other"), device="cpu")
    assert token_policy(other).words == first.words
    assert token_policy(other).digest != first.digest


@pytest.mark.parametrize("normalizer", [normalizers.Lowercase(), normalizers.Replace("w3", "w9")], ids=str)
def test_the_digest_tells_normalisers_of_few_words_apart(normalizer: Any, tmp_path: Path) -> None:
    model = matlens.load(str(save_with_ends(tmp_path)), device="cpu")
    before, ids = token_policy(model), encode_text(model, "W3 w3").ids
    model.tokenizer.backend_tokenizer.normalizer = normalizer
    assert encode_text(model, "W3 w3").ids != ids
    assert token_policy(model).digest != before.digest


def test_a_model_without_a_tokenizer_is_named(model_folder: Callable[[str], Path]) -> None:
    bare = matlens.load(str(model_folder("gpt2")), device="cpu")
    bare.tokenizer = None
    assert token_policy(bare) == (None, "no tokenizer")
    for attempt in (
        lambda: encode_text(bare, TEXT),
        lambda: matlens.make_prompts(bare, [TEXT]),
        lambda: matlens.make_examples(bare, Corpus("one", (TEXT,), 1, 0, 0, 0)),
    ):
        with pytest.raises(InputError, match="has no tokenizer, so no text can be turned into its tokens"):
            attempt()


def test_tokens_past_the_vocabulary_are_refused(tmp_path: Path) -> None:
    model = matlens.load(str(save_with_ends(tmp_path / "model")), device="cpu")
    model.tokenizer.add_tokens([f"extra{i}" for i in range(20)])
    assert encode_text(model, "w1 extra0").ids == [3, 52]
    with pytest.raises(InputError, match=r"becomes the token 71 \('extra19'\), and the model has 60 tokens"):
        encode_text(model, "w1 extra19")
    with pytest.raises(InputError, match="holds half of a surrogate pair"):
        encode_text(model, "w1 \ud800")


# A bridge of one's own


def fit(model: Any) -> MapSet:
    corpus = make_sentences()
    activations = matlens.collect(model, matlens.make_examples(model, corpus), progress=False)
    return MapSet.fit(activations, pairs=[(0, 3)], ridge=1.0, progress=False)


def test_a_bridge_with_another_policy_is_refused_until_it_is_wrapped(tmp_path: Path) -> None:
    folder = str(save_with_ends(tmp_path / "model"))
    model, bridge = (
        matlens.load(folder, device="cpu"),
        TransformerBridge.boot_transformers(folder, device="cpu"),
    )
    maps, others = fit(model), fit(bridge)
    assert token_policy(bridge).words == "'w49' in front"
    for ours, theirs in ((maps, bridge), (others, model)):
        with (
            pytest.raises(
                InputError, match=r"the same text becomes other tokens: .*'w49' in front.*matlens\.wrap"
            ),
            matlens.patched(theirs, matlens.jump(ours, 0, 3)),
        ):
            pass

    assert matlens.wrap(bridge) is bridge
    assert token_policy(bridge).words == "'w49' in front"  # as it does, unless it is told otherwise
    with matlens.patched(bridge, matlens.jump(others, 0, 3)):
        pass
    matlens.wrap(bridge, prepend_bos=False)
    assert token_policy(bridge) == token_policy(model)
    assert bridge.to_tokens(TEXT).tolist() == model.to_tokens(TEXT).tolist()
    tokens = model.to_tokens(TEXT)
    with matlens.patched(bridge, matlens.jump(maps, 0, 3)):
        logits = bridge(tokens)
    with matlens.patched(model, matlens.jump(maps, 0, 3)):
        assert torch.equal(logits, model(tokens))
    assert_near(fit(bridge)[0, 3].weight, maps[0, 3].weight)
    with (
        pytest.raises(InputError, match="becomes other tokens"),
        matlens.patched(bridge, matlens.jump(others, 0, 3)),
    ):
        pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_maps_of_another_precision_are_used_where_it_is_said(
    dtype: torch.dtype, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = str(model_folder("gpt2"))
    maps = fit(matlens.load(folder, device="cpu"))
    maps.save(tmp_path / "maps")
    half = matlens.load(folder, device="cpu", dtype=dtype)
    strict, lenient = MapSet.load(tmp_path / "maps"), MapSet.load(tmp_path / "maps", same_precision=False)
    with (
        pytest.raises(InputError, match=r"the same but for their precision, float32 .*same_precision=False"),
        matlens.patched(half, matlens.jump(strict, 0, 3)),
    ):
        pass
    for allowed in (lenient, lenient.held(), MapSet(maps.values(), same_precision=False)):
        with matlens.patched(half, matlens.jump(allowed, 0, 3)):
            assert half(half.to_tokens(TEXT)).dtype == dtype
    with torch.no_grad():
        next(half.original_model.parameters())[0, 0] += 1
    with (
        pytest.raises(InputError, match="weights or precision differ"),
        matlens.patched(half, matlens.jump(lenient, 0, 3)),
    ):
        pass
