"""Linear maps, sets of them and the pairs they are of: applied in float32, saved to the last bit."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import tree
from identities import make_identity
from small_maps import ORIGIN, PAIRS, linear, same

from matlens import InputError, LinearMap, MapSet, Site
from matlens.linear.mapsets import CONVENTION
from matlens.linear.pairs import resolve_pairs
from matlens.linear.published import read_tensors
from matlens.models.identity import Provenance


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_applying_is_the_matrix_product_in_float32(bias, shape, dtype):
    whole = linear("ln1_out.0", "attn_out.0", bias=bias)
    half = LinearMap(whole.weight.half(), None, "h.0", "h.1")
    h = torch.randn(*shape, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    for mapped in (whole, half):
        expected = torch.einsum("oi,...i->...o", mapped.weight.double(), h.double())
        if mapped.bias is not None:
            expected = expected + mapped.bias.double()
        assert mapped(h).dtype == torch.float32
        torch.testing.assert_close(mapped(h), expected.float(), rtol=1e-6, atol=1e-5)
    with pytest.raises(InputError):  # it would be broadcast
        LinearMap(torch.eye(4), torch.ones(1), "h.0", "h.1")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_all_tensors_are_those_of_the_formula(dtype):
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((5, 2), (5,), (2, 4))
    ]
    weight, bias, right = given
    mapped, h = LinearMap(weight, bias, "h.0", "h.1", right=right), torch.randn(3, 4, generator=generator)
    found = torch.autograd.grad(mapped(h).square().sum(), given)
    wide = [part.detach().double().requires_grad_() for part in given]
    expected = torch.autograd.grad((h.double() @ wide[2].T @ wide[0].T + wide[1]).square().sum(), wide)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=0
        )


def test_an_optimizer_recovers_a_map_from_its_vectors():
    truth, fitted = linear("h.0", "h.1", bias=True), linear("h.0", "h.1")
    fitted = replace(fitted, weight=torch.zeros(4, 4), bias=torch.zeros(4))
    for part in fitted.parts.values():
        part.requires_grad_()
    h = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    optimizer, expected = torch.optim.LBFGS(fitted.parts.values(), max_iter=100), truth(h)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (fitted(h) - expected).square().mean()
        loss.backward()
        return loss

    optimizer.step(loss)  # type: ignore[arg-type]
    copied = replace(truth, **fitted.state_dict())
    assert not copied.weight.requires_grad
    for name, part in copied.parts.items():
        torch.testing.assert_close(part, truth.parts[name], rtol=0, atol=1e-3)


def test_the_digest_follows_values_that_are_edited_in_place():
    one = linear("h.0", "h.1", bias=True)
    before = one.digest
    assert one.digest == before == linear("h.0", "h.1", bias=True).digest
    one.weight[0, 0] += 1
    assert one.digest != before
    assert linear("h.0", "h.1").digest != before


def test_the_provenance_of_a_set_is_what_its_maps_have_in_common(tmp_path):
    model = make_identity("small")
    one, other = (
        Provenance(model, {"corpus": corpus}, examples, "sampled", {"n_fitted": n, "ridge": 0.0, **more})
        for corpus, examples, n, more in (("news", "ab", 30, {}), ("wiki", "cd", 40, {"weights": "ef"}))
    )
    maps = [LinearMap(torch.eye(4), None, "h.0", f"h.{i}", of) for i, of in ((1, one), (2, other))]
    expected = Provenance(model, positions="sampled", details={"ridge": 0.0})
    for given in (maps, maps[::-1], [linear("h.0", "h.3"), *maps]):
        kept = MapSet(given)
        assert kept.provenance == expected
        assert kept.provenance.n_samples is None
    kept.save(tmp_path / "maps")
    assert [found.provenance for found in MapSet.load(tmp_path / "maps").values()] == [expected] * 3
    assert MapSet(maps[:1]).provenance == one


def test_maps_of_two_models_or_two_maps_of_a_pair_are_refused():
    one = LinearMap(torch.eye(4), None, "h.0", "h.1", ORIGIN)
    other = Provenance(make_identity("small", "beef"))
    with pytest.raises(InputError):
        MapSet([one, LinearMap(torch.eye(4), None, "h.0", "h.2", other)])
    with pytest.raises(InputError, match="one for each pair"):
        MapSet([one, linear("h.0", "h.1")])


@pytest.mark.parametrize("order", [PAIRS, [PAIRS[i] for i in (4, 0, 2, 1, 3)]])
def test_what_is_saved_comes_back_to_the_last_bit(order, tmp_path):
    saved = [linear(*pair, bias=pair[1] == "h.3") for pair in order]
    MapSet(saved, provenance=ORIGIN).save(tmp_path / "maps")
    loaded = MapSet.load(str(tmp_path / "maps"))
    assert list(loaded) == order
    for one in saved:
        found = loaded[one.source, one.target]
        assert same(found, one)
        assert found.provenance == loaded.provenance == ORIGIN
    for pair in [(0, 3), (0, "h.3"), (Site("h", 0), Site("h", -1))]:
        assert same(loaded[pair], loaded["h.0", "h.3"])
    assert CONVENTION.encode() in tree(tmp_path / "maps")["config.json"]
    loaded.save(tmp_path / "again")
    assert tree(tmp_path / "again") == tree(tmp_path / "maps")
    others = MapSet([replace(one, weight=one.weight + 1) for one in saved], provenance=ORIGIN)
    with pytest.raises(InputError):
        others.save(tmp_path / "maps")
    with pytest.raises(KeyError, match=r"no map h\.2 -> h\.3"):
        loaded[2, 3]
    some = loaded.in_memory([(0, 3), ("h.1", 2), (0, 3)], device="meta")
    assert list(some) == [("h.0", "h.3"), ("h.1", "h.2")]
    assert some[0, 3].weight.device.type == "meta"


def test_maps_that_are_not_finite_are_not_saved(tmp_path):
    weight = torch.eye(4)
    weight[1, 2] = torch.nan
    with pytest.raises(InputError, match=r"h\.0 -> h\.1 cannot be saved: a value of it is not finite"):
        MapSet([LinearMap(weight, None, "h.0", "h.1")]).save(tmp_path / "maps")
    assert not (tmp_path / "maps").exists()


def test_a_low_rank_map_is_saved_as_its_product(tmp_path):
    generator = torch.Generator().manual_seed(0)
    left, right, h = (torch.randn(*shape, generator=generator) for shape in ((5, 2), (2, 4), (3, 4)))
    low_rank = LinearMap(left, torch.ones(5), "h.0", "h.1", right=right)
    MapSet([low_rank]).save(tmp_path / "maps")
    expected = h.double() @ (left.double() @ right.double()).T + 1
    for mapped in (low_rank, MapSet.load(tmp_path / "maps")[0, 1]):
        torch.testing.assert_close(mapped(h).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ("all", "01 02 03 12 13 23"), ("last", "03 13 23"), ([(-3, -1), (0, -2)], "13 02"),
        ([("h.0", "h.2"), ("1", "-1")], "02 13"), (iter([(0, 3)]), "03"),
        ([("ffn_in.-1", "ffn_out.-1"), ("mid.1", 0)], [("ffn_in.2", "ffn_out.2"), ("mid.1", "h.0")]),
        *((wrong, None) for wrong in ([(0, 4)], [(-5, 3)], [(2, 2)], [("ln1_out.3", 3)], {0: 3}, (0, 3), [])),
    ],
)  # fmt: skip
def test_pairs_are_resolved_forward_within_the_model(pairs, expected):
    if isinstance(expected, str):
        expected = [(f"h.{a}", f"h.{b}") for a, b in expected.split()]
    asked = pairs if isinstance(pairs, str | dict | tuple) else list(pairs)
    models: list[Any] = [3, Provenance(make_identity(n_layers=3))]
    for model in models:
        if expected is None:
            with pytest.raises(InputError):
                resolve_pairs(asked, model)
        else:
            assert resolve_pairs(asked, model) == expected


def test_a_bias_that_would_be_broadcast_is_refused():
    with pytest.raises(InputError):
        LinearMap(torch.eye(4), torch.ones(1), "h.0", "h.1")


def test_sizes_in_a_file_are_not_believed():
    """A shape larger than the stored values is refused."""
    content = pickle.dumps(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(InputError):
        read_tensors(content.replace(b"K\x02K\x03\x86", b"K\x08K\x08\x86"), "a")
