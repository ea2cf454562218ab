"""Maps of sub-modules are least squares on the inputs and outputs of the plain modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import D_MODEL, MASKED, assert_near, load_plain, make_tokenizer, plain_vectors
from handpatched import submodules
from torch import Tensor

import matlens
from matlens import collect
from matlens.activations.activations import Activations
from matlens.data.examples import Examples
from matlens.models.layout import ModelLayout
from matlens.patching.submodules import fit_submodules, submodule_pairs

Models = Callable[[str], Any]
NAMES = ("gpt2", "gptj", "bert", "gemma2")


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_the_two_ends_of_each_sub_module_of_each_block(name, small_model):
    layout = ModelLayout.from_model(small_model(name))
    there = [part for part in ("attn", "ffn", "ln1", "ln2") if part in submodules(name)]
    assert there == ["attn", "ffn", "ln1", "ln2"][: 3 if name == "gptj" else 4]
    expected = [(f"{part}_in.{layer}", f"{part}_out.{layer}") for layer in range(3) for part in there]
    assert submodule_pairs(layout) == expected
    assert submodule_pairs(layout, ["ffn"]) == [pair for pair in expected if pair[0].startswith("ffn")]
    assert submodule_pairs(layout, ["ln2"]) == [pair for pair in expected if pair[0].startswith("ln2")]
    for pair in expected:
        assert [str(layout.resolve(site)) for site in pair] == list(pair)


def test_norms_after_attention_and_ffn_take_the_place_of_those_before(small_model):
    layout = ModelLayout.from_model(small_model("olmo2"))
    assert submodule_pairs(layout, ["ln1", "ffn"])[:2] == [
        ("ln1_post_in.0", "ln1_post_out.0"), ("ffn_in.0", "ffn_out.0"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def pair_of_models(model_folder, tmp_path_factory):
    """A small model by matlens and the same without, whose norms have biases that matter.

    Without, what a norm gives lies all but in a plane, and rounding decides what is fitted across it.
    """
    root, known = tmp_path_factory.mktemp("biased"), dict[str, tuple[Any, Any]]()

    def made(name: str) -> tuple[Any, Any]:
        if name not in known:
            plain = load_plain(name, model_folder(name))
            torch.manual_seed(1)
            for key, parameter in plain.named_parameters():
                if key.endswith("bias") and ("norm" in key.lower() or "ln_" in key):
                    parameter.data.add_(torch.randn_like(parameter))
            plain.save_pretrained(root / name)
            make_tokenizer(bert=name in MASKED).save_pretrained(root / name)
            known[name] = matlens.load(str(root / name), device="cpu"), plain
        return known[name]

    return made


def random_examples(n: int) -> Examples:
    """Sentences of 1 to 9 random tokens, so that many positions are the first."""
    generator = torch.Generator().manual_seed(1)
    lengths = 1 + torch.arange(n) % 9
    tokens = torch.randint(5, 55, (int(lengths.sum()),), generator=generator)
    positions = (torch.rand(n, generator=generator) * lengths).long()
    return Examples(tokens.numpy(), np.append(0, lengths.cumsum(0).numpy()), positions.numpy())


def samples_of(model: Any, positions: Any = "sampled") -> Activations:
    """Vectors at both ends of all sub-modules."""
    sites = [site for pair in submodule_pairs(ModelLayout.from_model(model)) for site in pair]
    examples = random_examples(180 if positions == "sampled" else 40)
    return collect(model, examples, sites, positions=positions, progress=False)


def plain_samples(
    name: str, model: Any, examples: Examples, positions: str
) -> tuple[dict[str, Tensor], Tensor]:
    """Float64 vectors of the plain model's modules, sentence by sentence, and each row's place in its own."""
    rows: dict[str, list[Tensor]] = {}
    places: list[int] = []
    for s, position in enumerate(examples.positions.tolist()):
        tokens = torch.from_numpy(examples.tokens[examples.offsets[s] : examples.offsets[s + 1]])
        chosen = [position] if positions == "sampled" else list(range(len(tokens)))
        places += chosen
        for site, vectors in plain_vectors(name, model, tokens).items():
            rows.setdefault(site, []).append(vectors[0, chosen].double())
    return {site: torch.cat(vectors) for site, vectors in rows.items()}, torch.tensor(places)


def least_squares(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.lstsq(x, y, driver="gelsd").solution.T


@pytest.mark.parametrize(("name", "positions"), [("gpt2", "all"), ("gptj", "sampled"), ("bert", "sampled")])
def test_maps_are_least_squares_on_the_vectors_of_the_plain_modules(name, positions, pair_of_models):
    model, other = pair_of_models(name)
    samples = samples_of(model, positions)
    plain, places = plain_samples(name, other, samples.examples, positions)
    later = places > 0
    assert 10 < int((~later).sum()) < len(later) - 2 * D_MODEL
    pairs = submodule_pairs(ModelLayout.from_model(model))
    whole = list(fit_submodules(samples, pairs, progress=False))
    some = list(fit_submodules(samples, pairs, rows=torch.from_numpy(samples.places > 0), progress=False))
    for (source, target), every, not_first in zip(pairs, whole, some, strict=True):
        assert (every.source, every.target, every.bias) == (source, target, None)
        assert (not_first.source, not_first.target, not_first.bias) == (source, target, None)
        expected = least_squares(plain[source], plain[target])
        assert_near(every.weight, expected, 1e-4)
        without = least_squares(plain[source][later], plain[target][later])
        assert_near(not_first.weight, without, 1e-4)
        assert float((without - expected).abs().max()) > 1e-2 * float(expected.abs().max())


def test_an_intercept_and_a_penalty_are_those_of_least_squares(small_model, plain_model):
    samples = samples_of(small_model("llama"))
    plain, _ = plain_samples("llama", plain_model("llama"), samples.examples, "sampled")
    x, y = plain["ffn_in.1"], plain["ffn_out.1"]
    (fitted,) = fit_submodules(samples, [("ffn_in.1", "ffn_out.1")], intercept=True, progress=False)
    solution = least_squares(torch.cat([x, torch.ones(len(x), 1).double()], 1), y)
    assert fitted.bias is not None
    assert_near(fitted.weight, solution[:, :-1], 1e-4)
    assert_near(fitted.bias, solution[:, -1], 1e-4)
    (fitted,) = fit_submodules(samples, [("ffn_in.1", "ffn_out.1")], ridge=9.0, progress=False)
    root = 3 * torch.eye(D_MODEL).double()
    penalised = least_squares(torch.cat([x, root]), torch.cat([y, torch.zeros_like(root)]))
    assert_near(fitted.weight, penalised, 1e-4)
    assert float((penalised - solution[:, :-1]).abs().max()) > 1e-2 * float(solution.abs().max())
