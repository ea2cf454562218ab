"""Behind the bridge a WikiLM is what its weights compute by hand, and does all that other models do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_near, make_sentences
from fairseq_by_hand import BANDS, EMBEDDINGS, LAYERS, N_WORDS, run, save, settings, weights

import matlens
from matlens import InputError, ffn
from matlens.models import ModelLayout, changes_of, token_policy

SENTENCES = ["w1 w40 w17 w3 w29 w9", "w17 w2", "w8 w8 w30 w21 w49 w35 w45"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("wikilm"))


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return matlens.load(path, device="cpu")


@pytest.fixture(scope="module")
def samples(model: Any) -> Any:
    corpus = make_sentences()
    sites = [str(site) for site in ModelLayout.from_model(model).sites]
    return matlens.collect(model, matlens.make_examples(model, corpus), sites=sites, progress=False)


def tokens_of(sentence: str) -> list[int]:
    return [2, *(4 + int(word[1:]) for word in sentence.split())]


def by_hand(sentence: str) -> dict[str, torch.Tensor]:
    return run(settings(), weights(settings()), tokens_of(sentence))


def unembedding() -> torch.Tensor:
    """Each word's row, with the projection of its band where that is not the first."""
    tensors, rows = weights(settings()), []
    for band in range(len(BANDS)):
        for word in tensors[f"{EMBEDDINGS}.{band}.0.weight"]:
            projection = tensors[f"{EMBEDDINGS}.{band}.1.weight"]
            rows.append(projection @ word if band else word)
    return torch.stack(rows)


def test_a_bridge_has_every_site(model: Any, path: Path) -> None:
    layout = ModelLayout.from_model(model)
    assert (layout.wiring.name, layout.n_layers, layout.d_model, layout.d_mlp) == ("pre-norm", 3, 16, 24)
    assert {"ln1_in", "ln1_out", "attn_out", "mid", "ln2_out", "ffn_post", "ffn_out"} <= set(layout.kinds)
    assert layout.resolve("blocks.2.attn.hook_z") is not None
    assert changes_of(model) == changes_of(matlens.wrap(matlens.load(path, device="cpu"))) == ()
    assert token_policy(model).words == "'</s>' in front"
    assert (model.cfg.n_ctx, model.cfg.d_vocab) == (48, N_WORDS)


def test_every_site_carries_what_the_weights_compute(samples: Any) -> None:
    sentences = make_sentences().sentences
    for row, position in enumerate(samples.examples.positions):
        expected = by_hand(sentences[row])
        for site in expected:
            if site != "logits":
                assert_near(samples[site][row], expected[site][position])
    assert bool((samples["ffn_post.1"] >= 0).all())


def test_the_readout_is_true_to_the_adaptive_softmax(model: Any, samples: Any) -> None:
    readout, h = matlens.Readout(model), samples[f"h.{LAYERS}"]
    sentences, positions = make_sentences().sentences, samples.examples.positions
    expected = torch.stack([by_hand(s)["logits"][p] for s, p in zip(sentences, positions, strict=True)])
    torch.testing.assert_close(readout.log_probs(h), expected, atol=1e-5, rtol=0)
    assert readout.top_ids(h).tolist() == expected.argmax(1).tolist()
    tops, ranks = readout.top_ids_and_ranks(h, torch.full((len(h),), 40))
    assert tops.tolist() == expected.argmax(1).tolist()
    assert ranks.tolist() == (1 + (expected > expected[:, 40:41]).sum(1)).tolist()
    some = torch.tensor([3, 17, 50])
    given = h.clone().requires_grad_(True)
    scores = readout.logits(given, tokens=some, gradients=True)
    torch.testing.assert_close(scores, expected[:, some], atol=1e-5, rtol=0)
    scores.sum().backward()
    assert given.grad is not None
    with pytest.raises(InputError, match="must be between 0 and"):
        readout.logits(h, tokens=torch.tensor([N_WORDS]))


def test_value_vectors_are_read_by_the_whole_unembedding(model: Any, samples: Any) -> None:
    values, projection = ffn.ValueVectors(model), ffn.Projection.from_model(model)
    tensors = weights(settings())
    torch.testing.assert_close(projection.unembedding, unembedding())
    for layer in range(LAYERS):
        second, bias = (tensors[f"decoder.layers.{layer}.fc2.{kind}"] for kind in ("weight", "bias"))
        torch.testing.assert_close(values.layer(layer), second.T)
        assert_near(samples[f"ffn_post.{layer}"] @ second.T + bias, samples[f"ffn_out.{layer}"])
    scores = projection.scores(values.layer(1))
    torch.testing.assert_close(scores, values.layer(1) @ unembedding().T, atol=1e-5, rtol=0)
    with pytest.raises(InputError, match="no final norm"):
        ffn.Projection.after_norm(model)


def test_a_norm_behind_the_last_block_is_part_of_the_readout(tmp_path: Path) -> None:
    args = settings(no_decoder_final_norm=False)
    model = matlens.load(save(tmp_path, args), device="cpu")
    seen = run(args, weights(args), tokens_of(SENTENCES[0]))
    torch.testing.assert_close(
        matlens.Readout(model).log_probs(seen[f"h.{LAYERS}"]), seen["logits"], atol=1e-5, rtol=0
    )
    assert ffn.Projection.after_norm(model).norm is not None
