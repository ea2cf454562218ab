"""The readout of h^L is the model's own logits, screened or not; one that is not is refused."""

from __future__ import annotations

import pytest
import torch
from conftest import D_MODEL, N_LAYERS, WIRINGS, assert_near, load_plain, plain_vectors
from torch import Tensor, nn

import matlens
from matlens import InputError, Readout, ffn
from matlens.models import readout
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.norms import NormGain
from matlens.models.readout import is_plain_linear, top_and_rank

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


@pytest.mark.parametrize(("name", "exact"), [("llama", True), ("bert", True), ("gemma2", False)])
def test_top_ids_and_ranks_are_those_of_all_logits(name, exact, small_model, monkeypatch):
    monkeypatch.setattr(readout, "is_plain_linear", lambda module: exact)
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
    monkeypatch.setattr(readout, "_scalings", lambda model: [(1.0, None)])
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
    assert gpt2.identity == ModelIdentity.from_model(small_model("gpt2"))
    assert (gpt2.d_model, gpt2.d_vocab) == (D_MODEL, 60)
    for other in (llama.identity, Provenance(llama.identity)):
        with pytest.raises(InputError):
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


WIDTH = 48


def layer(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    unembed = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        unembed.weight.copy_(weight)
        if bias is not None:
            unembed.bias.copy_(bias)
    return unembed


def in_float64(unembed: nn.Linear, x: Tensor) -> Tensor:
    logits = x.double() @ unembed.weight.detach().double().T
    return logits if unembed.bias is None else logits + unembed.bias.detach().double()


def check(unembed: nn.Linear, x: Tensor, ids: Tensor) -> None:
    logits = in_float64(unembed, x)
    top, rank = top_and_rank(unembed, x, ids)
    assert torch.equal(logits.gather(1, top[:, None])[:, 0], logits.amax(1))
    assert torch.equal(rank, (logits > logits.gather(1, ids[:, None])).sum(1))


@pytest.mark.parametrize("n_tokens", [1, 1025])
@pytest.mark.parametrize("biased", [False, True])
def test_top_tokens_and_ranks_are_those_of_float64(n_tokens, biased):
    generator = torch.Generator().manual_seed(n_tokens)
    weight = torch.randn(n_tokens, WIDTH, generator=generator)
    weight *= torch.rand(n_tokens, 1, generator=generator) * 3
    x = torch.randn(40, WIDTH, generator=generator) + 1
    x[:, 3] *= 1000  # as streams are
    bias = 10 * torch.randn(n_tokens, generator=generator) if biased else None
    check(layer(weight, bias), x, torch.randint(n_tokens, (40,), generator=generator))


def confused(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens that the quick product confuses."""
    weight = torch.randn(WIDTH, generator=generator) + 1e-5 * torch.randn(3000, WIDTH, generator=generator)
    x = torch.randn(30, WIDTH, generator=generator)
    quick = x.bfloat16() @ weight.bfloat16().T
    assert (quick.float().argmax(1) != (x.double() @ weight.double().T).argmax(1)).sum() > 15
    return weight, x


def rounded_weights(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Features that are exact in bfloat16, and nearly orthogonal to all tokens."""
    x = torch.ones(30, WIDTH)
    for row in x:
        row[torch.randperm(WIDTH, generator=generator)[::2]] = -1
    return 5 + 0.01 * torch.randn(3000, WIDTH, generator=generator), x


def rounded_logits(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Small integers are exact in bfloat16, and their products of about 3,000 are not."""
    weight, x = (torch.randint(7, 10, (n, WIDTH), generator=generator).float() for n in (3000, 30))
    return weight, x


@pytest.mark.parametrize("make", [confused, rounded_weights, rounded_logits])
def test_tokens_that_rounding_confuses_are_told_apart(make):
    generator = torch.Generator().manual_seed(0)
    weight, x = make(generator)
    check(layer(weight), x, torch.randint(3000, (30,), generator=generator))


def test_the_first_of_equal_tokens_is_on_top_and_none_is_above_its_equals():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(900, WIDTH, generator=generator).repeat(3, 1)  # each token three times
    x = torch.randn(20, WIDTH, generator=generator)
    unembed = layer(weight)
    logits = in_float64(unembed, x)[:, :900]
    top, rank = top_and_rank(unembed, x, logits.argmax(1) + 1800)
    assert torch.equal(top, logits.argmax(1))
    assert not rank.any()
    assert top_and_rank(unembed, torch.zeros(2, WIDTH), None)[0].tolist() == [0, 0]
    assert top_and_rank(unembed, torch.zeros(0, WIDTH), torch.zeros(0, dtype=torch.int64))[0].shape == (0,)
    large, _ = top_and_rank(unembed, torch.full((1, WIDTH), 1e38), torch.tensor([3]))
    assert 0 <= int(large) < 2700


def test_a_layer_with_a_hook_is_not_plain():
    unembed = layer(torch.randn(10, WIDTH))
    assert is_plain_linear(unembed)
    assert not is_plain_linear(nn.Sequential(unembed))
    assert not is_plain_linear(nn.Linear(3, 3).bfloat16())
    unembed.register_forward_hook(lambda module, inputs, output: output + 1)
    assert not is_plain_linear(unembed)


@pytest.mark.parametrize(("norm", "centred"), [
    (torch.nn.LayerNorm(7), True), (torch.nn.LayerNorm(32, bias=False), True), (torch.nn.RMSNorm(7), False),
], ids=str)  # fmt: skip
def test_the_gain_is_that_of_the_norm_without_size_and_bias(norm, centred):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    gain = NormGain.from_module(norm, norm.weight.shape[0])
    assert gain.centred == centred
    assert_near(gain.gain, norm.weight.detach())
    terms = torch.randn(5, norm.weight.shape[0], generator=generator)
    whole = terms.sum(0)
    size = whole.std(correction=0) if centred else whole.square().mean().sqrt()
    bias = 0 if getattr(norm, "bias", None) is None else norm.bias.detach()
    assert_near(gain(terms).sum(0) / size + bias, norm(whole).detach(), 1e-4)
