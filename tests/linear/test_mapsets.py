"""Sets of maps: fitted in one line, read by sites, and saved to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import tree
from identities import make_identity
from small_maps import ORIGIN, PAIRS, linear, same

from matlens.errors import InputError
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import CONVENTION, MapSet
from matlens.models.identity import Provenance

# Sets of maps


def test_the_provenance_of_a_set_is_what_its_maps_have_in_common(tmp_path):
    model = make_identity("small")
    one, other = (
        Provenance(model, {"corpus": corpus}, examples, "sampled", {"n_fitted": n, "ridge": 0.0, **more})
        for corpus, examples, n, more in (("news", "ab", 30, {}), ("wiki", "cd", 40, {"weights": "ef"}))
    )
    maps = [
        LinearMap(torch.eye(4), None, "h.0", "h.1", one), LinearMap(torch.eye(4), None, "h.0", "h.2", other)
    ]  # fmt: skip
    expected = Provenance(model, positions="sampled", details={"ridge": 0.0})
    for given in (maps, maps[::-1], [linear("h.0", "h.3"), *maps]):
        kept = MapSet(given)
        assert kept.provenance == expected
        assert kept.provenance.n_samples is None
    kept.save(tmp_path / "maps")
    for found in MapSet.load(tmp_path / "maps").values():
        assert found.provenance == expected
    assert MapSet(maps[:1]).provenance == one


def test_maps_of_two_models_or_two_maps_of_a_pair_are_refused():
    one = LinearMap(torch.eye(4), None, "h.0", "h.1", ORIGIN)
    with pytest.raises(InputError, match="do not belong together"):
        MapSet([one, LinearMap(torch.eye(4), None, "h.0", "h.2", Provenance(make_identity("small", "beef")))])
    changed = Provenance(replace(make_identity("small"), changes=("a hook",)))
    with pytest.raises(InputError, match="a hook"):
        MapSet([one, LinearMap(torch.eye(4), None, "h.0", "h.2", changed)])
    with pytest.raises(InputError, match="one for each pair"):
        MapSet([one, linear("h.0", "h.1")])


# A folder


@pytest.mark.parametrize("order", [PAIRS, [PAIRS[i] for i in (4, 0, 2, 1, 3)]])
def test_what_is_saved_comes_back_to_the_last_bit(order, tmp_path):
    saved = [linear(*pair, bias=pair[1] == "h.3") for pair in order]
    MapSet(saved, provenance=ORIGIN).save(tmp_path / "maps")
    loaded = MapSet.load(str(tmp_path / "maps"))
    assert list(loaded) == order
    assert loaded.provenance == ORIGIN
    for one in saved:
        found = loaded[one.source, one.target]
        assert same(found, one)
        assert found.provenance == ORIGIN
    assert sorted(tree(tmp_path / "maps")) == [
        "config.json", "h.0.safetensors", "h.1.safetensors", "ln1_out.0.safetensors",
    ]  # fmt: skip
    assert CONVENTION.encode() in tree(tmp_path / "maps")["config.json"]
    loaded.save(tmp_path / "again")
    assert tree(tmp_path / "again") == tree(tmp_path / "maps")
    others = MapSet([replace(one, weight=one.weight + 1) for one in saved], provenance=ORIGIN)
    with pytest.raises(InputError):
        others.save(tmp_path / "maps")


# Fitting in one line


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
