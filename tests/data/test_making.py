"""Examples of corpora, pairs, prompts, running text and images."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from conftest import D_MODEL, N_CTX, N_LAYERS, WORDS, assert_near, listening, make_sentences, make_tokenizer
from patched_models import patched
from scipy.stats import chi2
from sentences import corpus_of, many, positions_of, sentences_of
from torch import Tensor

import matlens
from matlens import InputError, InputWarning, LinearMap, Readout, make_examples
from matlens.activations import Activations
from matlens.data import Corpus, Examples, make_image_examples, make_pairs
from matlens.data.making import make_windows
from matlens.models.layout import ModelLayout
from matlens.models.tokens import TextTokens


def positions(examples: Examples, corpus: Corpus) -> dict[str, int]:
    return dict(zip(corpus.sentences, examples.positions.tolist(), strict=True))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_position_does_not_depend_on_the_corpus_around_the_sentence(name, small_model, sentences):
    model = small_model(name)
    whole = positions(make_examples(model, sentences, seed=3), sentences)
    backwards = corpus_of(list(sentences.sentences[::-1]))
    parts = sentences.split(n_train=20, n_validation=15, seed=1)
    alone = [corpus_of([text]) for text in sentences.sentences[:5]]
    renamed = replace(sentences, name="another name")
    for part in (backwards, *parts, *alone, renamed):
        drawn = positions(make_examples(model, part, seed=3), part)
        assert drawn == {text: whole[text] for text in part.sentences}


def test_position_depends_on_seed_and_sentence(small_model):
    """With another seed a position is the same as often as chance has it, one time in ten."""
    corpus = corpus_of(many(2000, 10))
    first, other, again = (
        make_examples(small_model("llama"), corpus, seed=seed).positions for seed in (0, 1, 0)
    )
    assert np.array_equal(first, again)
    same = float((first == other).mean())
    assert abs(same - 0.1) < 4 * (0.1 * 0.9 / 2000) ** 0.5
    assert len(set(first.tolist())) == 10  # not the same one for all


@pytest.mark.parametrize(("name", "first"), [("llama", 0), ("bert", 1)])
def test_positions_are_uniform(name, first, small_model):
    """Chi-square over the eight words."""
    examples = make_examples(
        small_model(name), corpus_of(many(4000, 8)), seed=5, sample_special=name != "bert"
    )
    observed = np.bincount(examples.positions, minlength=first + 8)[first:]
    assert (len(observed), observed.sum()) == (8, 4000)
    statistic = float(((observed - 500) ** 2 / 500).sum())
    assert chi2.ppf(1e-4, df=7) < statistic < chi2.ppf(1 - 1e-4, df=7)


@pytest.mark.parametrize(("name", "sample_special"), [("gpt2", True), ("bert", False)])
def test_tokens_are_the_tokenizers_with_one_mask_in_masked_models(
    name, sample_special, small_model, sentences
):
    tokenizer = make_tokenizer(bert=name == "bert")
    examples = make_examples(small_model(name), sentences, seed=2, sample_special=sample_special)
    for s, text in enumerate(sentences.sentences):
        ids = tokenizer(text)["input_ids"]
        if name == "bert":
            assert tokenizer.mask_token_id not in ids
            ids[examples.positions[s]] = tokenizer.mask_token_id
        tokens = examples.tokens[examples.offsets[s] : examples.offsets[s + 1]]
        assert tokens.tolist() == ids
        assert examples.lengths[s] == len(ids)
        assert 0 <= examples.positions[s] < len(ids)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_sentences_longer_than_the_context_are_cut_and_counted(name, small_model):
    tokenizer = make_tokenizer(bert=name == "bert")
    added = len(tokenizer("")["input_ids"])
    lengths = [5, N_CTX - added - 1, N_CTX - added, N_CTX - added + 1, 3 * N_CTX]
    corpus = corpus_of([many(1, length)[0] for length in lengths])
    with pytest.warns(InputWarning, match=f"2 of 5 sentences .* after {N_CTX} tokens"):
        examples = make_examples(small_model(name), corpus, seed=1)
    assert examples.n_truncated == examples.provenance["n_truncated"] == 2
    assert examples.lengths.tolist() == [5 + added, N_CTX - 1, N_CTX, N_CTX, N_CTX]
    for s, text in enumerate(corpus.sentences):
        ids = tokenizer(text, truncation=True, max_length=N_CTX)["input_ids"]
        if name == "bert":
            ids[examples.positions[s]] = tokenizer.mask_token_id
        assert examples.tokens[examples.offsets[s] : examples.offsets[s + 1]].tolist() == ids
    long = corpus_of(many(400, 2 * N_CTX))
    with pytest.warns(InputWarning, match="400 of 400"):
        drawn = make_examples(small_model(name), long).positions
    assert drawn.max() >= N_CTX - 3
    assert drawn.min() <= 2


def test_the_shorter_of_the_models_and_the_tokenizers_context_counts(model_folder):
    model = matlens.load(str(model_folder("gpt2")), device="cpu")
    corpus = corpus_of(many(3, N_CTX + 10))
    model.tokenizer.model_max_length = 10**30  # what tokenizers say that know of no limit
    assert set(make_examples(model, corpus).lengths.tolist()) == {N_CTX}
    model.tokenizer.model_max_length = 12
    assert set(make_examples(model, corpus).lengths.tolist()) == {12}


# A list of texts in place of a corpus


# Pairs

SOURCES = [" ".join(WORDS[(3 * i + j) % 50] for j in range(4 + i)) for i in range(5)]
TARGETS = [" ".join(WORDS[(7 * i + 2 * j) % 50] for j in range(8 - i)) for i in range(5)]


@pytest.fixture(scope="module")
def decoder(model_folder):
    return matlens.load(str(model_folder("t5")), device="cpu", stack="decoder")


def test_pairs_are_shifted_as_in_training_and_kept_in_folders(decoder, tmp_path):
    examples = make_pairs(decoder, SOURCES, TARGETS, seed=3)
    for number, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        start, end = examples.offsets[number : number + 2]
        first, last = examples.source_offsets[number : number + 2]
        ids = decoder.tokenizer(target)["input_ids"]
        assert examples.source_tokens[first:last].tolist() == decoder.tokenizer(source)["input_ids"]
        assert examples.tokens[start:end].tolist() == [0, *ids[:-1]]
    alone = make_pairs(decoder, SOURCES[2:3], TARGETS[2:3], seed=3)
    assert alone.positions[0] == examples.positions[2]
    matlens.collect(decoder, examples, folder=tmp_path / "kept", progress=False)
    kept = Activations.load(tmp_path / "kept").examples
    assert kept.fingerprint == examples.fingerprint
    assert kept.head(2).fingerprint == make_pairs(decoder, SOURCES[:2], TARGETS[:2], seed=3).fingerprint
    # Other sources are other examples.
    others = make_pairs(decoder, SOURCES[::-1], TARGETS, seed=3)
    assert others.fingerprint != examples.fingerprint


def test_what_is_no_pair_is_refused(decoder, small_model):
    with pytest.raises(InputError, match="stack='decoder'"):
        make_pairs(small_model("gpt2"), SOURCES, TARGETS)
    for sources, targets in ((SOURCES, TARGETS[1:]), ([], [])):
        with pytest.raises(InputError, match=r"^sources and targets"):
            make_pairs(decoder, sources, targets)
    with pytest.raises(InputError, match="got 0"):
        make_pairs(decoder, [""], ["w1"])


# Windows of running text


def test_windows_are_the_tokens_of_the_whole_text_one_after_the_other(small_model, sentences, tmp_path):
    model = small_model("gpt2")
    ids = model.tokenizer(" ".join(sentences.sentences))["input_ids"]
    windows = make_windows(model, sentences, size=20)
    assert sentences_of(windows) == [ids[start : start + 20] for start in range(0, len(ids), 20)]
    assert positions_of(windows) == [[len(window) - 1] for window in sentences_of(windows)]
    assert windows.provenance["corpus"] == "words"
    assert windows.provenance["window"] == 20
    assert make_windows(model, sentences).lengths.max() == N_CTX
    path = tmp_path / "text.txt"
    path.write_text(text := "\n".join(sentences.sentences) + "\n\nw1")
    from_file = make_windows(model, path, size=20)
    assert sentences_of(from_file)[0] == sentences_of(windows)[0]
    assert from_file.provenance["corpus_fingerprint"] == sha256(text.encode()).hexdigest()[:16]


def test_what_stands_in_front_of_a_text_stands_in_front_of_each_window(small_model, sentences, monkeypatch):
    model = small_model("llama")
    ids = model.tokenizer(" ".join(sentences.sentences))["input_ids"]
    around = TextTokens([58, *ids, 59], [True, *[False] * len(ids), True])  # a BOS, and an EOS behind all
    monkeypatch.setattr("matlens.data.making.encode_text", lambda *_: around)
    windows = sentences_of(make_windows(model, sentences, size=20))
    assert {window[0] for window in windows} == {58}
    assert [token for window in windows for token in window[1:]] == ids
    assert max(map(len, windows)) == 20


def test_some_windows_are_spread_over_the_text(small_model, sentences):
    model = small_model("llama")
    every = sentences_of(make_windows(model, sentences, size=16))
    whole = [window for window in every if len(window) == 16]
    assert len(whole) < len(every), "the last one is shorter"
    assert sentences_of(make_windows(model, sentences, size=16, max_windows=3)) == [
        whole[0], whole[round((len(whole) - 1) / 2)], whole[-1]
    ]  # fmt: skip
    assert sentences_of(make_windows(model, sentences, size=16, max_windows=999)) == every
    one_too_many = replace(sentences, sentences=(" ".join(["w1"] * 33),))
    assert len(make_windows(model, one_too_many, size=16)) == 2, "a window of one token predicts nothing"


def test_what_makes_no_windows_is_refused(small_model, sentences, tmp_path):
    model = small_model("llama")
    for text, n in (("", 0), ("w1", 1)):
        (tmp_path / "short.txt").write_text(text)
        with pytest.raises(InputError, match=rf"at least two tokens, got {n}"):
            make_windows(model, tmp_path / "short.txt")
    with pytest.raises(InputError, match="predicts masked tokens"):
        make_windows(small_model("bert"), sentences)
    for name in ("gpt2", "bert"):
        with pytest.raises(InputError, match="at least two"):
            make_windows(small_model(name), ["w1 w2 w3 w4"], size=20, targets=True)


def test_a_decoder_has_the_next_token_as_target(small_model, sentences):
    model = small_model("gpt2")
    windows = make_windows(model, sentences, size=10, max_windows=4)
    text = make_windows(model, sentences, size=10, max_windows=4, targets=True)
    assert text.tokens.tolist() == windows.tokens.tolist()
    assert text.sentences.tolist() == sorted([0, 1, 2, 3] * 9)
    for s in range(4):
        window = windows.tokens[10 * s : 10 * (s + 1)]
        assert text.positions[text.sentences == s].tolist() == list(range(9))
        assert text.targets[text.sentences == s].tolist() == window[1:].tolist()
    assert text.select(np.array([1, 3])).targets.tolist() == text.targets[text.sentences % 2 == 1].tolist()
    with pytest.raises(InputError, match="one per position"):
        replace(text, targets=np.arange(3))


def test_a_masked_model_has_the_masked_tokens_as_targets(small_model, sentences):
    model = small_model("bert")
    text = make_windows(model, sentences, size=30, max_windows=12, targets=True)
    assert len(text) == 12
    whole = [model.tokenizer(sentence)["input_ids"] for sentence in sentences.sentences[:12]]
    for s, ids in enumerate(whole):
        tokens = text.tokens[text.offsets[s] : text.offsets[s + 1]].copy()
        places = text.positions[text.sentences == s]
        assert len(places) == max(1, round(0.15 * (len(ids) - 2)))
        assert set(tokens[places]) == {model.tokenizer.mask_token_id}
        tokens[places] = text.targets[text.sentences == s]
        assert tokens.tolist() == ids
    other = make_windows(model, sentences, size=30, max_windows=12, targets=True, seed=1)
    assert other.positions.tolist() != text.positions.tolist()


IMAGES = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(5))
PLACES = 10  # nine patches behind the class token
# By hand, from the source of ViT.
MODULES = {
    "ln1": "layernorm_before", "attn": "attention", "ln2": "layernorm_after", "ffn": "mlp",
}  # fmt: skip
ENDS = {f"{kind}_{side}": (path, side) for kind, path in MODULES.items() for side in ("in", "out")} | {
    "mid": ("layernorm_after", "in"), "ffn_post": ("mlp.fc2", "in"),
}  # fmt: skip


@torch.inference_mode()
def plain_vectors(plain: Any) -> dict[str, Tensor]:
    """Vectors of every site, ``[image, place, d]``, and the logits."""
    with listening(plain.vit.layers, plain.vit.layernorm, ENDS) as seen:
        seen["logits"] = plain(IMAGES).logits
    return seen


def test_sites_are_the_plain_models_and_add_up(small_model, plain_model):
    model, theirs = small_model("vit"), plain_vectors(plain_model("vit"))
    known, examples = ModelLayout.from_model(model), make_image_examples(model, IMAGES)
    assert (known.wiring.name, known.d_mlp) == ("pre-norm", 48)
    assert {str(site) for site in known.sites} == set(theirs) - {"logits"}
    ours = matlens.collect(model, examples, known.sites, positions="all", progress=False)
    for site in known.sites:
        assert_near(ours[site], theirs[str(site)].flatten(0, 1))
    at_class = matlens.collect(model, examples, progress=False)
    assert_near(at_class["h.2"], theirs["h.2"][:, 0])
    patch = make_image_examples(model, IMAGES, position=-1)
    assert_near(matlens.collect(model, patch, batch_tokens=1, progress=False)["h.2"], theirs["h.2"][:, 9])
    assert patch.fingerprint != examples.fingerprint != make_image_examples(model, IMAGES.flip(0)).fingerprint
    assert_near(Readout(model).logits(theirs[f"h.{N_LAYERS}"][:, 0]), theirs["logits"], 2e-6)


@pytest.mark.parametrize(
    ("source", "target"),
    [("h.0", "h.2"), ("attn_in.1", "attn_out.1"), ("ffn_in.2", "ffn_out.2")],
)
def test_patched_passes_are_those_of_the_plain_model_patched_by_hand(
    source, target, small_model, plain_model
):
    model, plain = small_model("vit"), plain_model("vit")
    weight = torch.randn(D_MODEL, D_MODEL, generator=torch.Generator().manual_seed(1)) / D_MODEL**0.5
    linear, given = LinearMap(weight, None, source, target), []
    (kind, first), (_, last) = source.split("."), target.split(".")
    blocks = plain.vit.layers
    entered = blocks[int(first)] if kind == "h" else blocks[int(first)].get_submodule(MODULES[kind[:-3]])
    left = blocks[int(last) - 1] if kind == "h" else entered

    def enter(_: Any, args: Any, kwargs: Any) -> None:
        given[:] = [args[0] if args else kwargs["hidden_states"]]

    def leave(_: Any, __: Any, output: Any) -> Any:
        instead = linear(given[0])
        return (instead, *output[1:]) if isinstance(output, tuple) else instead

    handles = [entered.register_forward_pre_hook(enter, with_kwargs=True), left.register_forward_hook(leave)]
    try:
        expected = plain_vectors(plain)["logits"]
    finally:
        for handle in handles:
            handle.remove()
    with torch.inference_mode():
        before = model(IMAGES)
        with patched(model, [linear]):
            assert_near(model(IMAGES), expected)
        assert torch.equal(model(IMAGES), before)
    assert float((expected - before).abs().max()) > 1e-3 * float(before.abs().max())


def test_what_is_no_image_is_refused(small_model):
    model = small_model("vit")
    for images in (IMAGES[..., :8], IMAGES / 0):
        with pytest.raises(InputError, match=r"images must be finite and of the shape \('n', 3, 12, 12\)"):
            make_image_examples(model, images)
    with pytest.raises(InputError, match="position"):
        make_image_examples(model, IMAGES, position=PLACES)
    with pytest.raises(InputError, match="must be a vision transformer"):
        make_image_examples(small_model("gpt2"), IMAGES)
    with pytest.raises(InputError, match="has no tokenizer"):
        matlens.make_examples(model, make_sentences())
    words = matlens.make_token_examples(small_model("gpt2"), [[3, 4, 5]])
    with pytest.raises(InputError, match=r"must have images of the shape \(3, 12, 12\)"):
        matlens.collect(model, words, progress=False)
