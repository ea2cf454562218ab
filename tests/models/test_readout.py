"""The readout of h^L is the model's own logits, and a readout that is not is refused."""

from __future__ import annotations

import pytest
import torch
from conftest import D_MODEL, N_LAYERS, WIRINGS, assert_near, load_plain, plain_vectors
from torch import Tensor

import matlens
from matlens import InputError, Readout, ffn
from matlens.models import readout
from matlens.models.identity import ModelIdentity, Provenance

LAST = f"h.{N_LAYERS}"


def random_tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, 56, (3, 20), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [*WIRINGS, "cohere", "roberta", "opt-narrow"])
def test_last_stream_reads_out_to_the_models_own_logits(name, small_model, plain_model):
    found = plain_vectors(name, plain_model(name), random_tokens())
    ours = Readout(small_model(name))
    assert_near(ours.logits(found[LAST]), found["logits"], 2e-6)
    log_probs = ours.log_probs(found[LAST])
    assert_near(log_probs, found["logits"].log_softmax(-1), 2e-6)
    # One vector, or any stack of them.
    assert_near(ours.logits(found[LAST][1, 4]), found["logits"][1, 4], 2e-6)


@pytest.mark.parametrize(("name", "screened"), [("llama", True), ("bert", True), ("gemma2", False)])
def test_top_ids_and_ranks_are_those_of_all_logits(name, screened, small_model, monkeypatch):
    monkeypatch.setattr(readout.Screen, "suits", lambda module: screened)
    ours, generator = Readout(small_model(name)), torch.Generator().manual_seed(1)
    vectors = 3 * torch.randn(200, D_MODEL, generator=generator)
    ids = torch.randint(0, ours.d_vocab, (200,), generator=generator)
    logits = ours.logits(vectors).double()
    top, rank = ours.top_ids_and_ranks(vectors, ids)
    assert torch.equal(top, ours.top_ids(vectors))
    slack = 1e-5 * logits.abs().amax(1)
    assert bool((logits.amax(1) - logits.gather(1, top[:, None])[:, 0] <= slack).all())
    given, slack = logits.gather(1, ids[:, None]), slack[:, None]
    assert bool((rank > (logits > given + slack).sum(1)).all())
    assert bool((rank <= (logits > given - slack).sum(1)).all())
    assert len(rank.unique()) > 20
    assert ours.top_ids(vectors[:0]).shape == (0,)


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere"])
def test_a_readout_without_scaling_or_cap_is_refused(name, small_model, monkeypatch):
    monkeypatch.setattr(readout, "_scaling", lambda model: (1.0, None))
    with pytest.raises(InputError, match="do not give the model's own logits"):
        Readout(small_model(name))


@pytest.mark.parametrize(("name", "part"), [("gpt2", 0), *(("bert", i) for i in range(3))])
def test_a_readout_without_one_of_its_modules_is_refused(name, part, small_model, monkeypatch):
    modules = readout.head_modules(small_model(name))
    monkeypatch.setattr(readout, "head_modules", lambda model: modules[:part] + modules[part + 1 :])
    with pytest.raises(InputError, match="do not give the model's own logits"):
        Readout(small_model(name))


def test_half_precision_is_read_out_in_float32_with_the_models_own_weights(model_folder):
    folder, dtype = model_folder("gpt2"), torch.bfloat16
    plain = load_plain("gpt2", folder, dtype=dtype)
    found = plain_vectors("gpt2", plain, random_tokens())
    ours = Readout(matlens.load(str(folder), device="cpu", dtype=dtype)).logits(found[LAST])
    assert ours.dtype == torch.float32
    exact = plain.float()  # the same rounded weights
    with torch.inference_mode():
        assert_near(ours, exact.lm_head(exact.transformer.ln_f(found[LAST].float())), 2e-6)
    assert_near(ours, found["logits"].float(), 8 * torch.finfo(dtype).eps)


def test_a_read_out_knows_its_model(small_model):
    gpt2, llama = Readout(small_model("gpt2")), Readout(small_model("llama"))
    assert gpt2.identity == ModelIdentity.from_model(small_model("gpt2")).of_weights
    assert (gpt2.d_model, gpt2.d_vocab) == (D_MODEL, 60)
    for other in (llama.identity, Provenance(llama.identity)):
        with pytest.raises(InputError, match=r"^The readout and the activations do not belong together"):
            gpt2.check_same(other)


@pytest.mark.refused
def test_vectors_that_cannot_be_read_are_refused(small_model):
    ours, projection = Readout(small_model("gpt2")), ffn.Projection.from_model(small_model("gpt2"))
    for vectors, told in (
        (torch.zeros(4, D_MODEL + 1), f"must have {D_MODEL} dimensions"),
        (torch.full((4, D_MODEL), float("nan")), "must be finite"),
        (torch.full((4, D_MODEL), float("inf")), "must be finite"),
    ):
        for attempt in (ours.logits, ours.top_ids, projection.scores, projection.top):
            with pytest.raises(InputError, match=told):
                attempt(vectors)
        with pytest.raises(InputError, match=told):
            ours.top_tokens(vectors[0])
