"""How text becomes tokens is one policy: the bridge's own, seen in the identity and used for examples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import WORDS, make_tokenizer, save_model
from tokenizers import processors
from transformer_lens.model_bridge import TransformerBridge

import matlens
from matlens import InputError
from matlens.corpora import Corpus
from matlens.models import ModelIdentity, encode_text, token_policy

TEXT = " ".join(WORDS[:6])


def save_with_ends(folder: Path, *, front: bool = False, end: bool = False) -> Path:
    """A small model whose tokenizer has a BOS and an EOS, and puts them around a text or not."""
    save_model("gpt2", folder)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "w49", "eos_token": "w48"})
    if front or end:
        template = f"{'w49 ' if front else ''}$A{' w48' if end else ''}"
        ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("w49", "w48")]
        backend = tokenizer.backend_tokenizer
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    tokenizer.save_pretrained(folder)
    return folder


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


def test_a_model_without_a_tokenizer_is_named(model_folder: Callable[[str], Path]) -> None:
    bare = matlens.load(str(model_folder("gpt2")), device="cpu")
    bare.tokenizer = None
    assert token_policy(bare) == matlens.models.TokenPolicy(None, "no tokenizer")
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
