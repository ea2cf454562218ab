"""Stand-ins are least squares on what plain modules take and give; `mat_attn` needs no context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import (
    ARCHITECTURES,
    D_MODEL,
    MASKED,
    N_LAYERS,
    assert_near,
    load_plain,
    make_tokenizer,
    plain_vectors,
)
from handpatched import submodule_part, submodules
from patched_models import linear, owned, patched
from torch import Tensor

import matlens
from matlens import InputError, LinearMap, MapSet, collect
from matlens.activations.activations import Activations
from matlens.data.examples import Examples
from matlens.linear.maps import tensor_digest
from matlens.models.layout import ModelLayout
from matlens.models.sites import Site
from matlens.patching.replacements import mat_attn
from matlens.patching.submodules import attend_nowhere, fit_submodules, submodule_pairs

Models = Callable[[str], Any]
NAMES = (*ARCHITECTURES, "neox-sequential")
RANGES = [(a, b) for a in range(N_LAYERS + 1) for b in range(a, N_LAYERS + 1)]


# Which there are


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_the_two_ends_of_each_sub_module_of_each_block(name: str, small_model: Models) -> None:
    layout = ModelLayout.from_model(small_model(name))
    there = [part for part in ("attn", "ffn", "ln1", "ln2") if part in submodules(name)]
    assert there == ["attn", "ffn", "ln1", "ln2"][: 3 if name == "gptj" else 4]
    expected = [(f"{part}_in.{layer}", f"{part}_out.{layer}") for layer in range(3) for part in there]
    assert submodule_pairs(layout) == expected
    assert submodule_pairs(layout, ["ffn"]) == [pair for pair in expected if pair[0].startswith("ffn")]
    assert submodule_pairs(layout, ["ln2"]) == [pair for pair in expected if pair[0].startswith("ln2")]
    for pair in expected:
        assert [str(layout.resolve(site)) for site in pair] == list(pair)


def test_a_model_whose_wiring_is_not_known_is_refused(small_model: Models) -> None:
    with pytest.raises(InputError, match="blocks of this model are stream-only"):
        submodule_pairs(ModelLayout.from_model(small_model("bloom")))


# Fits


@pytest.fixture(scope="module")
def pair_of_models(
    model_folder: Models, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Any, Any]]:
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


def samples_of(model: Any, positions: Any = "drawn") -> Activations:
    """Vectors at both ends of all sub-modules."""
    sites = [site for pair in submodule_pairs(ModelLayout.from_model(model)) for site in pair]
    examples = random_examples(180 if positions == "drawn" else 40)
    return collect(model, examples, sites, positions=positions, progress=False)


def plain_samples(
    name: str, model: Any, examples: Examples, positions: str
) -> tuple[dict[str, Tensor], Tensor]:
    """Float64 vectors of the plain model's modules, sentence by sentence, and each row's place in its own."""
    rows: dict[str, list[Tensor]] = {}
    places: list[int] = []
    for s, position in enumerate(examples.positions.tolist()):
        tokens = torch.from_numpy(examples.tokens[examples.offsets[s] : examples.offsets[s + 1]])
        chosen = [position] if positions == "drawn" else list(range(len(tokens)))
        places += chosen
        for site, vectors in plain_vectors(name, model, tokens).items():
            rows.setdefault(site, []).append(vectors[0, chosen].double())
    return {site: torch.cat(vectors) for site, vectors in rows.items()}, torch.tensor(places)


def least_squares(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.lstsq(x, y, driver="gelsd").solution.T


@pytest.mark.parametrize("positions", ["drawn", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_stand_ins_are_least_squares_on_the_vectors_of_the_plain_modules(
    name: str, positions: str, pair_of_models: Models
) -> None:
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


def test_an_intercept_and_a_penalty_are_those_of_least_squares(
    small_model: Models, plain_model: Models
) -> None:
    samples = samples_of(small_model("llama"))
    plain, _ = plain_samples("llama", plain_model("llama"), samples.examples, "drawn")
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


def test_a_stand_in_says_what_it_was_fitted_on(small_model: Models) -> None:
    samples = samples_of(small_model("llama"))
    pairs = submodule_pairs(ModelLayout.from_model(small_model("llama")), ["attn"])
    some = torch.arange(samples.n_rows) % 3 > 0
    all_rows = {"n_fitted": samples.n_rows, "intercept": False, "ridge": 0.5}
    some_rows = all_rows | {"n_fitted": int(some.sum()), "rows": tensor_digest(some)}
    for rows, details in ((None, all_rows), (some, some_rows)):
        maps = MapSet(fit_submodules(samples, pairs, rows=rows, ridge=0.5, progress=False))
        assert maps.provenance == samples.provenance.with_details(**details)
        with patched(small_model("llama"), mat_attn(maps, 0, N_LAYERS)):
            pass
        other = patched(small_model("neox-sequential"), mat_attn(maps, 0, N_LAYERS))
        with pytest.raises(InputError, match="The maps and this model do not belong together"), other:
            pass


def test_sites_that_were_not_collected_are_refused(small_model: Models) -> None:
    model = small_model("llama")
    pairs = submodule_pairs(ModelLayout.from_model(model), ["ffn", "ln1"])[:4]
    sites = [site for pair in pairs for site in pair]
    for absent in (sites[:1], sites[3:4], sites[1:5]):
        others = [site for site in sites if site not in absent]
        some = collect(model, random_examples(20), others, progress=False)
        with pytest.raises(InputError, match=rf"no vectors of {', '.join(sorted(absent, key=Site.parse))};"):
            list(fit_submodules(some, pairs, progress=False))


def test_no_rows_leave_nothing_to_fit_on(small_model: Models) -> None:
    model, n = small_model("llama"), 50
    firsts = Examples(np.arange(n), np.arange(n + 1), np.zeros(n, dtype=np.int64))
    samples = collect(model, firsts, ["ffn_in.0", "ffn_out.0"], progress=False)
    for rows in (torch.zeros(n, dtype=torch.bool), torch.from_numpy(samples.places > 0)):
        with pytest.raises(InputError, match="select at least one sample"):
            list(fit_submodules(samples, [("ffn_in.0", "ffn_out.0")], rows=rows, progress=False))


# Attention without context

SENTENCE = torch.tensor([7, 3, 41, 12, 12, 59, 30, 22, 8, 17])
# One more parallel block with one norm, layers whose FFN is in no module of its own, and one that gives more.
MORE_NAMES = (*NAMES, "cohere", "opt", "opt-narrow", "gpt-oss")


def attention_maps(model: Any) -> MapSet:
    """Random stand-ins for attention, some with an intercept."""
    maps = []
    for layer in range(N_LAYERS):
        replaced = submodule_part("attn", layer, seed=layer, bias=layer != 1)
        maps.append(owned(linear(replaced), model))
    return MapSet(maps)


@torch.inference_mode()
def stream_of(model: Any, tokens: Tensor, replacements: Any = ()) -> list[Tensor]:
    """The stream at all tokens of one sentence in a patched pass, layer by layer."""
    seen: dict[int, Tensor] = {}
    hooks = [
        (
            ModelLayout.from_model(model).hook(layer),
            lambda value, hook, layer=layer: seen.update({layer: value[0].clone()}),
        )
        for layer in range(N_LAYERS + 1)
    ]
    with patched(model, replacements), model.hooks(fwd_hooks=hooks):
        model(tokens[None])
    return [seen[layer] for layer in range(N_LAYERS + 1)]


@pytest.mark.parametrize("name", MORE_NAMES)
def test_attending_nowhere_is_a_pass_patched_at_all_tokens(name: str, small_model: Models) -> None:
    model, maps = small_model(name), attention_maps(small_model(name))
    for tokens in (SENTENCE, SENTENCE[4:5]):  # the second has no context to attend to
        clean = stream_of(model, tokens)
        for first, last in RANGES:
            attended = attend_nowhere(model, maps, clean[first], first, last)
            assert attended.dtype == torch.float32
            if first == last:
                assert torch.equal(attended, clean[first])
                continue
            assert_near(attended, stream_of(model, tokens, mat_attn(maps, first, last))[last])
            assert float((attended - clean[last]).abs().amax(1).min()) > 1e-2
            # One vector alone is enough.
            assert_near(attend_nowhere(model, maps, clean[first][-1:], first, last), attended[-1:])


def test_in_half_precision_the_model_computes_as_it_does_in_a_patched_pass(
    small_model: Models, model_folder: Callable[[str], Path]
) -> None:
    for name in ("llama", "bert"):
        model = matlens.load(str(model_folder(name)), device="cpu", dtype=torch.bfloat16)
        maps = attention_maps(model)
        h = stream_of(model, SENTENCE)[0].float()
        attended = attend_nowhere(model, maps, h, 0, N_LAYERS)
        assert attended.dtype == torch.float32
        expected = stream_of(model, SENTENCE, mat_attn(maps, 0, N_LAYERS))[N_LAYERS]
        assert expected.dtype == torch.bfloat16
        assert_near(attended, expected.float(), 0.02)


@pytest.mark.parametrize(("first", "last"), [(2, 1), (-1, 2), (3, 0), (0, -5), (0, 4), (4, 4)])
def test_ranges_that_run_backwards_or_leave_the_model_are_refused(
    first: int, last: int, small_model: Models
) -> None:
    h = torch.zeros(2, D_MODEL)
    with pytest.raises(InputError, match=r"runs backwards or starts below 0|out of range"):
        attend_nowhere(small_model("llama"), attention_maps(small_model("llama")), h, first, last)


def test_layers_count_from_the_end_where_they_are_negative(small_model: Models) -> None:
    model, pairs = small_model("gpt2"), [("attn_in.1", "attn_out.1"), ("attn_in.2", "attn_out.2")]
    samples = collect(model, random_examples(20), ["h.1", *(site for pair in pairs for site in pair)])
    maps, h = MapSet(fit_submodules(samples, pairs, progress=False)), samples["h.1"]
    for known in (maps, attention_maps(model)):
        attended = attend_nowhere(model, known, h, 1, N_LAYERS)
        assert float((attended - h).abs().max()) > 1e-2
        for first, last in ((1, -1), (-N_LAYERS, N_LAYERS), (-N_LAYERS, -1)):
            assert torch.equal(attend_nowhere(model, known, h, first, last), attended)


def test_a_decoder_of_an_encoder_is_refused(small_model: Models, model_folder: Callable[[str], Path]) -> None:
    decoder = matlens.load(str(model_folder("t5")), device="cpu", stack="decoder")
    with pytest.raises(InputError, match="read the encoder's last layer as well"):
        attend_nowhere(decoder, attention_maps(decoder), torch.zeros(2, D_MODEL), 0, 1)


def test_vectors_that_are_not_finite_are_refused(small_model: Models) -> None:
    model, h = small_model("llama"), torch.zeros(2, D_MODEL)
    h[1, 3] = torch.nan
    with pytest.raises(InputError, match=r"h\.1"):
        attend_nowhere(model, attention_maps(model), h, 1, 2)


def test_a_missing_stand_in_is_refused(small_model: Models) -> None:
    some = MapSet(
        linear for pair, linear in attention_maps(small_model("llama")).items() if pair[0] != "attn_in.1"
    )
    h = torch.zeros(2, D_MODEL)
    attend_nowhere(small_model("llama"), some, h, 2, 3)
    with pytest.raises(KeyError, match=r"no map attn_in\.1 -> attn_out\.1"):
        attend_nowhere(small_model("llama"), some, h, 0, 3)


def test_a_name_that_is_no_sub_module_is_refused(small_model: Models) -> None:
    with pytest.raises(InputError, match=r"^names must be"):
        submodule_pairs(ModelLayout.from_model(small_model("llama")), ["fnn"])


@pytest.mark.refused
@pytest.mark.parametrize("change", [-1, 1])
def test_rows_of_another_length_are_refused(change: int, small_model: Models) -> None:
    samples = collect(small_model("llama"), random_examples(20), ["ffn_in.0", "ffn_out.0"], progress=False)
    rows = torch.ones(samples.n_rows + change, dtype=torch.bool)
    with pytest.raises(InputError, match=rf"rows must have a value for each of the {samples.n_rows} samples"):
        list(fit_submodules(samples, [("ffn_in.0", "ffn_out.0")], rows=rows, progress=False))


def test_without_context_the_model_is_checked_as_with_it(small_model: Models) -> None:
    """Maps of another model, and blocks whose wiring is not known, are refused here too."""
    samples = samples_of(small_model("llama"))
    pairs = submodule_pairs(ModelLayout.from_model(small_model("llama")), ["attn"])
    maps, h = MapSet(fit_submodules(samples, pairs, progress=False)), torch.ones(2, D_MODEL)
    with pytest.raises(InputError, match="The maps and this model do not belong together"):
        attend_nowhere(small_model("neox-sequential"), maps, h, 0, N_LAYERS)
    bloom = small_model("bloom")
    bare = MapSet(owned(LinearMap(maps[pair].weight, None, *pair), bloom) for pair in pairs)
    with pytest.raises(InputError, match="no site 'attn_in'"):
        attend_nowhere(bloom, bare, h, 0, N_LAYERS)
