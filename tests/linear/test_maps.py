"""Linear maps and sets of them: applying, composing, and a folder that gives back the same bits."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from identities import make_identity
from torch import Tensor

from matlens.errors import InputError
from matlens.linear.maps import CONVENTION, LinearMap, MapSet, write_maps
from matlens.models.identity import Provenance
from matlens.models.sites import Site
from matlens.storage.folders import Workplace

Pair = tuple[str, str]
WIDTHS = {"h.0": 4, "h.1": 4, "h.2": 4, "h.3": 4, "ln1_out.0": 4, "attn_out.0": 6}
SEED = Provenance(details={"seed": 5})
ORIGIN = Provenance(make_identity("small"), details={"seed": 3})
PAIRS = [("h.0", "h.1"), ("h.0", "h.3"), ("h.1", "h.2"), ("h.1", "h.3"), ("ln1_out.0", "attn_out.0")]


def linear(source: str, target: str, *, bias: bool = False, seed: int = 0) -> LinearMap:
    """A map with numbers of its own."""
    sites = list(WIDTHS)
    number = 1000 * seed + 100 * sites.index(source) + sites.index(target)
    generator = torch.Generator().manual_seed(number)
    weight = torch.randn(WIDTHS[target], WIDTHS[source], generator=generator)
    return LinearMap(weight, torch.randn(len(weight), generator=generator) if bias else None, source, target)


def same(one: LinearMap, other: LinearMap) -> bool:
    """To the last bit."""
    biases = (one.bias is None and other.bias is None) or (
        one.bias is not None and other.bias is not None and torch.equal(one.bias, other.bias)
    )
    return (
        biases
        and torch.equal(one.weight, other.weight)
        and (one.source, one.target) == (other.source, other.target)
    )


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


# One map


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_applying_is_the_matrix_product(bias: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mapped = linear("ln1_out.0", "attn_out.0", bias=bias)
    h = torch.randn(*shape, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.einsum("oi,...i->...o", mapped.weight.double(), h.double())
    if mapped.bias is not None:
        expected = expected + mapped.bias.double()
    assert mapped(h).dtype == torch.float32
    torch.testing.assert_close(mapped(h), expected.float())


@pytest.mark.parametrize("first_bias", [False, True])
@pytest.mark.parametrize("second_bias", [False, True])
def test_composing_is_applying_one_after_the_other(first_bias: bool, second_bias: bool) -> None:
    first = linear("h.0", "ln1_out.0", bias=first_bias)
    second = linear("ln1_out.0", "attn_out.0", bias=second_bias)
    h = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    composed = first.then(second)
    assert (composed.source, composed.target) == ("h.0", "attn_out.0")
    assert (composed.bias is None) == (not first_bias and not second_bias)
    torch.testing.assert_close(composed(h), second(first(h)), rtol=1e-5, atol=1e-5)
    assert composed.weight.dtype == torch.float32


@given(st.lists(st.booleans(), min_size=3, max_size=3))
def test_composing_is_associative(biases: list[bool]) -> None:
    a, b, c = (linear(f"h.{i}", f"h.{i + 1}", bias=bias) for i, bias in enumerate(biases))
    left, right = a.then(b).then(c), a.then(b.then(c))
    torch.testing.assert_close(left.weight, right.weight, rtol=1e-5, atol=1e-5)
    assert (left.bias is None) == (right.bias is None) == (not any(biases))
    if left.bias is not None and right.bias is not None:
        torch.testing.assert_close(left.bias, right.bias, rtol=1e-5, atol=1e-5)


def test_maps_that_do_not_meet_are_not_composed() -> None:
    with pytest.raises(InputError, match=r"onto h\.1 cannot be followed by one from h\.2"):
        linear("h.0", "h.1").then(linear("h.2", "h.3"))


def test_a_solution_in_float64_is_kept_in_float32_apart_from_it() -> None:
    weight, bias = torch.randn(4, 4, dtype=torch.float64).T, torch.randn(4, dtype=torch.float64)
    kept = LinearMap.from_solution(weight, bias, "h.0", "h.1", ORIGIN)
    assert kept.weight.dtype == torch.float32
    assert kept.weight.is_contiguous()
    assert torch.equal(kept.weight, weight.float())
    assert kept.bias is not None
    assert torch.equal(kept.bias, bias.float())
    assert kept.provenance == ORIGIN
    assert LinearMap.from_solution(weight, None, "h.0", "h.1").bias is None
    with pytest.raises(AttributeError):
        kept.weight = torch.zeros(4, 4)  # type: ignore[misc]


# Sets of maps


def test_a_set_is_asked_by_layers_names_and_sites() -> None:
    maps = MapSet([linear(*pair) for pair in PAIRS], provenance=ORIGIN)
    assert list(maps) == PAIRS
    assert len(maps) == 5
    for pair in [(0, 3), ("h.0", "h.3"), (0, "h.3"), (Site("h", 0), Site("h", 3))]:
        assert same(maps[pair], linear("h.0", "h.3"))
    assert same(maps["ln1_out.0", "attn_out.0"], linear("ln1_out.0", "attn_out.0"))
    assert (0, 3) in maps
    assert (3, 0) not in maps
    assert maps.provenance == ORIGIN


def test_a_set_comes_from_where_its_maps_come_from_unless_told_otherwise() -> None:
    known = LinearMap(torch.eye(4), None, "h.0", "h.1", ORIGIN)
    assert MapSet([known, linear("h.0", "h.2")]).provenance == ORIGIN
    assert MapSet([known], provenance=SEED).provenance == SEED
    assert MapSet([known], provenance=Provenance()).provenance == Provenance()
    assert MapSet().provenance == Provenance()


def test_a_map_that_is_missing_is_named_with_some_that_are_there() -> None:
    few = MapSet([linear(*pair) for pair in PAIRS])
    with pytest.raises(
        KeyError, match=r"no map h\.2 -> h\.9; there are 5: h\.0 -> h\.1, .*, ln1_out\.0 -> attn_out\.0"
    ):
        few[2, 9]
    square = torch.eye(2)
    many = MapSet([LinearMap(square, None, f"h.{a}", f"h.{b}") for a in range(30) for b in range(a + 1, 31)])
    with pytest.raises(KeyError) as told:
        many[5, 2]
    text = str(told.value)
    assert "no map h.5 -> h.2; there are 465: h.0 -> h.1, h.0 -> h.2, h.0 -> h.3, ..., h.28 -> h.30" in text
    assert text.endswith("h.29 -> h.30'")
    assert len(text) < 200


def test_another_model_is_refused() -> None:
    maps = MapSet([linear("h.0", "h.1")], provenance=ORIGIN)
    maps.provenance.require_same(make_identity("renamed"), ours="the maps")
    named = r"The maps and this model .*'small' .* f00d, and 'small' with the fingerprint beef"
    with pytest.raises(InputError, match=named):
        maps.provenance.require_same(make_identity("small", "beef"), ours="the maps")
    with pytest.raises(InputError, match="Their models are not known, and 'small'"):
        MapSet([linear("h.0", "h.1")]).provenance.require_same(make_identity("small"), ours="the maps")


# A folder


@pytest.mark.parametrize("order", [PAIRS, PAIRS[::-1], [PAIRS[i] for i in (0, 2, 4, 1, 3)]])
def test_what_is_saved_comes_back_to_the_last_bit(order: list[Pair], tmp_path: Path) -> None:
    kept = [linear(*pair, bias=pair[1] == "h.3") for pair in order]
    MapSet(kept, provenance=ORIGIN).save(tmp_path / "maps")
    loaded = MapSet.load(str(tmp_path / "maps"))
    assert list(loaded) == order
    assert loaded.provenance == ORIGIN
    for one in kept:
        found = loaded[one.source, one.target]
        assert same(found, one)
        assert found.provenance == ORIGIN
    assert sorted(tree(tmp_path / "maps")) == [
        "config.json", "h.0.safetensors", "h.1.safetensors", "ln1_out.0.safetensors",
    ]  # fmt: skip
    assert CONVENTION.encode() in tree(tmp_path / "maps")["config.json"]
    # What was loaded can be saved elsewhere, and is the same once more.
    loaded.save(tmp_path / "again")
    assert tree(tmp_path / "again") == tree(tmp_path / "maps")


def test_numbers_that_are_not_ordinary_come_back_too(tmp_path: Path) -> None:
    weight = torch.tensor([[0.0, -0.0, 1e-45, 3.4028235e38], [1.0, -1e-38, 2.0**-126, 0.1]])
    MapSet([LinearMap(weight, None, "h.0", "h.1")]).save(tmp_path / "maps")
    found = MapSet.load(tmp_path / "maps")[0, 1].weight
    assert torch.equal(found.view(torch.int32), weight.view(torch.int32))


def test_maps_that_share_memory_are_saved_like_others(tmp_path: Path) -> None:
    whole = torch.randn(8, 5)
    kept = [
        LinearMap(whole[:4, :4], whole[:4, 4], "h.0", "h.1"),
        LinearMap(whole[4:, :4], whole[4:, 4], "h.0", "h.2"),
        LinearMap(whole[:4, :4], None, "h.0", "h.3"),
        LinearMap(same_for_both := torch.eye(4), None, "h.1", "h.2"),
        LinearMap(same_for_both, None, "h.1", "h.3"),
    ]
    MapSet(kept).save(tmp_path / "maps")
    loaded = MapSet.load(tmp_path / "maps")
    for one in kept:
        assert same(loaded[one.source, one.target], one)


def test_other_maps_never_pass_for_those_that_a_folder_holds(tmp_path: Path) -> None:
    MapSet([linear("h.0", "h.1")], provenance=ORIGIN).save(tmp_path / "maps")
    other = linear("h.0", "h.1", seed=1)
    assert not same(other, linear("h.0", "h.1"))
    try:
        MapSet([other], provenance=ORIGIN).save(tmp_path / "maps")
    except InputError:
        return  # refused: good as well
    assert same(MapSet.load(tmp_path / "maps")[0, 1], other)


def test_a_map_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    MapSet([linear(*pair) for pair in PAIRS]).save(tmp_path / "maps")
    loaded = MapSet.load(tmp_path / "maps")
    other = tmp_path / "other"
    MapSet([linear(*pair, bias=True) for pair in PAIRS]).save(other)
    (other / "h.1.safetensors").replace(tmp_path / "maps" / "h.1.safetensors")
    (tmp_path / "maps" / "h.0.safetensors").unlink()
    assert same(loaded["h.1", "h.3"], linear("h.1", "h.3", bias=True))
    with pytest.raises(InputError, match=r"h\.0\.safetensors cannot be read"):
        loaded["h.0", "h.1"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def garble(path: Path) -> None:
    path.write_bytes(b"\xff" * 64)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, garble, empty, Path.unlink])
def test_a_damaged_file_is_named_when_the_folder_is_opened_and_when_a_map_is_read(
    damage: Any, tmp_path: Path
) -> None:
    MapSet([linear(*pair) for pair in PAIRS]).save(tmp_path / "maps")
    opened_before = MapSet.load(tmp_path / "maps")
    damage(tmp_path / "maps" / "h.1.safetensors")
    with pytest.raises(
        InputError, match=r"h\.1\.safetensors cannot be read as safetensors.* Fit the maps again"
    ):
        MapSet.load(tmp_path / "maps")
    with pytest.raises(InputError, match=r"h\.1\.safetensors cannot be read"):
        opened_before[1, 3]
    assert same(opened_before[0, 3], linear("h.0", "h.3"))


def test_a_file_of_another_source_is_refused(tmp_path: Path) -> None:
    MapSet([linear(*pair) for pair in PAIRS]).save(tmp_path / "maps")
    (tmp_path / "maps" / "h.1.safetensors").replace(tmp_path / "maps" / "h.0.safetensors")
    MapSet([linear("h.1", "h.3")]).save(tmp_path / "other")
    (tmp_path / "other" / "h.1.safetensors").replace(tmp_path / "maps" / "h.1.safetensors")
    with pytest.raises(InputError, match=r"h\.0\.safetensors cannot be read"):
        MapSet.load(tmp_path / "maps")


def test_folders_without_finished_maps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no finished maps"):
        MapSet.load(tmp_path)
    place = Workplace(tmp_path / "activations", "activations", {})
    place.open()
    with pytest.raises(InputError, match="broken off"):
        MapSet.load(tmp_path / "activations")
    place.finish()
    with pytest.raises(InputError, match="does not hold maps"):
        MapSet.load(tmp_path / "activations")


# Fitting into a folder


class Fit:
    """Gives maps and remembers what it was asked for; fails after so many if told to."""

    def __init__(self, after: int | None = None, error: BaseException | None = None) -> None:
        self.asked: list[list[Pair]] = []
        self.after, self.error = after, error

    def __call__(self, pairs: list[Pair]) -> Iterator[LinearMap]:
        self.asked.append(pairs)
        for i, pair in enumerate(pairs):
            if self.error is not None and i == self.after:
                raise self.error
            yield linear(*pair, bias=True)


def fitted(folder: Path, fit: Fit, pairs: list[Pair] = PAIRS, origin: Provenance = ORIGIN) -> MapSet:
    return write_maps(folder, pairs, fit, origin)


@pytest.mark.parametrize(("after", "complete"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)])
def test_an_interrupted_fit_goes_on_with_the_sources_that_are_missing(
    after: int, complete: int, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path / "maps", Fit(after, KeyboardInterrupt()))
    found = sorted(name for name in tree(tmp_path / "maps") if name.endswith(".safetensors"))
    assert found == [f"h.{i}.safetensors" for i in range(len(found))]
    # That a source is complete may show only when the next has begun.
    assert complete - 1 <= len(found) <= complete
    whole = {name: (tmp_path / "maps" / name).stat().st_ino for name in found}
    with pytest.raises(InputError, match="broken off"):
        MapSet.load(tmp_path / "maps")

    fit = Fit()
    maps = fitted(tmp_path / "maps", fit)
    assert fit.asked == [[pair for pair in PAIRS if f"{pair[0]}.safetensors" not in found]]
    assert {name: (tmp_path / "maps" / name).stat().st_ino for name in found} == whole
    for pair in PAIRS:
        assert same(maps[pair], linear(*pair, bias=True))
    fitted(tmp_path / "at once", Fit())
    assert tree(tmp_path / "maps") == tree(tmp_path / "at once")

    fit = Fit()
    again = fitted(tmp_path / "maps", fit)
    assert fit.asked == []
    assert list(again) == PAIRS


@pytest.mark.parametrize("after", range(5))
@pytest.mark.parametrize("there_before", [False, True])
def test_a_fit_that_fails_leaves_nothing(there_before: bool, after: int, tmp_path: Path) -> None:
    if there_before:
        (tmp_path / "maps").mkdir()
    with pytest.raises(InputError, match="not finite"):
        fitted(tmp_path / "maps", Fit(after, InputError("not finite")))
    assert (tmp_path / "maps").exists() == there_before
    assert tree(tmp_path / "maps") == {}
    fit = Fit()
    fitted(tmp_path / "maps", fit)
    assert fit.asked == [PAIRS]


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("pairs", "origin"), [(PAIRS[:3], ORIGIN), (PAIRS, ORIGIN.with_details(seed=4)), (PAIRS, SEED)]
)
def test_the_folder_of_another_fit_is_refused_and_not_touched(
    pairs: list[Pair], origin: Mapping[str, Any], finished: bool, tmp_path: Path
) -> None:
    if finished:
        fitted(tmp_path / "maps", Fit())
    else:
        with pytest.raises(KeyboardInterrupt):
            fitted(tmp_path / "maps", Fit(3, KeyboardInterrupt()))
    before, fit = tree(tmp_path / "maps"), Fit()
    with pytest.raises(InputError, match="belongs to another job"):
        fitted(tmp_path / "maps", fit, pairs, origin)
    assert fit.asked == []
    assert tree(tmp_path / "maps") == before


def test_maps_are_written_source_by_source_as_they_come(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def fit(pairs: list[Pair]) -> Iterator[LinearMap]:
        for pair in pairs:
            seen.append(sorted(path.name for path in (tmp_path / "maps").glob("*.safetensors")))
            yield linear(*pair)

    write_maps(tmp_path / "maps", PAIRS, fit, ORIGIN)
    assert [len(names) for names in seen] in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 2])


def test_the_tensors_of_a_source_lie_in_one_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    fitted(tmp_path / "maps", Fit())
    held: dict[str, Tensor] = load_file(tmp_path / "maps" / "h.0.safetensors")
    assert sorted(held) == ["h.1", "h.1/bias", "h.3", "h.3/bias"]


def test_a_set_holds_maps_of_one_model_and_one_for_each_pair() -> None:
    other = Provenance(make_identity("small", "beef"))
    one, two = LinearMap(torch.eye(4), None, "h.0", "h.1", ORIGIN), linear("h.0", "h.1")
    with pytest.raises(InputError, match="maps of one model"):
        MapSet([one, LinearMap(torch.eye(4), None, "h.0", "h.2", other)])
    with pytest.raises(InputError, match="2 maps for 1 pairs"):
        MapSet([one, two])


def test_a_layer_that_counts_from_an_unknown_end_is_refused() -> None:
    maps = MapSet([linear("h.0", "h.1")])
    for layer in (-1, "h.-1"):
        with pytest.raises(InputError, match="counts from the end"):
            maps[0, layer]
