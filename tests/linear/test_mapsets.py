"""Sets of maps: fitted in one line, asked by sites, and a folder that gives back the same bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from identities import make_identity
from small_maps import ORIGIN, PAIRS, SEED, Pair, linear, same
from torch import Tensor
from trees import tree

from matlens.activations.activations import Activations
from matlens.data.examples import Examples
from matlens.errors import InputError
from matlens.linear.fitting import fit_samples
from matlens.linear.maps import LinearMap, tensor_digest
from matlens.linear.mapsets import CONVENTION, MapSet, write_maps
from matlens.models.identity import Provenance
from matlens.models.sites import Site
from matlens.numerics import split_product

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


def test_a_set_says_of_maps_from_several_places_only_what_is_so_of_all(tmp_path: Path) -> None:
    model = make_identity("small")
    one, other = (
        Provenance(model, {"corpus": corpus}, examples, "drawn", {"n_fitted": n, "ridge": 0.0, **more})
        for corpus, examples, n, more in (("news", "ab", 30, {}), ("wiki", "cd", 40, {"weights": "ef"}))
    )
    maps = [
        LinearMap(torch.eye(4), None, "h.0", "h.1", one), LinearMap(torch.eye(4), None, "h.0", "h.2", other)
    ]  # fmt: skip
    expected = Provenance(model, positions="drawn", details={"ridge": 0.0})
    for given in (maps, maps[::-1], [linear("h.0", "h.3"), *maps]):
        kept = MapSet(given)
        assert kept.provenance == expected
        assert kept.n_samples is None
    kept.save(tmp_path / "maps")
    for found in MapSet.load(tmp_path / "maps").values():
        assert found.provenance == expected
    assert MapSet(maps[:1]).provenance == one


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
    maps.provenance.check_same(make_identity("renamed"), ours="the maps")
    named = r"The maps and this model .*'small' .* f00d, and 'small' with the fingerprint beef"
    with pytest.raises(InputError, match=named):
        maps.provenance.check_same(make_identity("small", "beef"), ours="the maps")
    with pytest.raises(InputError, match="Their models are not known, and 'small'"):
        MapSet([linear("h.0", "h.1")]).provenance.check_same(make_identity("small"), ours="the maps")


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
    with pytest.raises(InputError, match="unfinished"):
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


def test_what_is_no_site_has_no_map() -> None:
    maps = MapSet([linear("h.0", "h.1")])
    assert (0, 1) in maps
    for pair in (("no site", 1), (0, -1), (None, 1), (0, 1, 2), "h.0"):
        assert pair not in maps


# Fitting in one line


N, D, L = 60, 5, 3


def collected(*more: str) -> Activations:
    """Vectors of a model of three blocks, the widths of two sites not that of the stream."""
    generator = torch.Generator().manual_seed(1)
    sites = [f"h.{layer}" for layer in range(L + 1)] + ["ffn_in.2", "ffn_post.2", *more]
    vectors = {site: torch.randn(N, 7 if "post" in site else D, generator=generator) for site in sites}
    examples = Examples(np.zeros(N, dtype=np.int64), np.arange(N + 1), np.zeros(N, dtype=np.int64))
    origin = Provenance(make_identity(n_layers=L, d_model=D), {"corpus": "words"}, details={"seed": 3})
    return Activations(vectors, examples, "drawn", origin)


def least_squares(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> tuple[Tensor, Tensor | None]:
    """The same by numpy's rows: a penalty is samples that pull to 0, an intercept a column of ones."""
    x, y = x.double(), y.double()
    if intercept:
        x = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    penalty = ridge**0.5 * torch.eye(x.shape[1]).double()
    if intercept:
        penalty[-1] = 0
    solution = torch.linalg.lstsq(
        torch.cat([x, penalty]),
        torch.cat([y, torch.zeros(len(penalty), y.shape[1]).double()]),
        driver="gelsd",
    ).solution.T
    return (solution[:, :-1], solution[:, -1]) if intercept else (solution, None)


@pytest.mark.parametrize("some", [False, True], ids=["all rows", "some rows"])
@pytest.mark.parametrize(("intercept", "ridge"), [(False, 0.0), (True, 0.0), (False, 2.0), (True, 2.0)])
@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (None, [(0, 3), (1, 3), (2, 3)]),
        ("last", [(0, 3), (1, 3), (2, 3)]),
        ("all", [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]),
        ([(0, -1), ("ffn_in.-1", "ffn_post.2")], [(0, 3), ("ffn_in.2", "ffn_post.2")]),
    ],
)
def test_maps_fitted_in_one_line_are_least_squares(
    pairs: Any, expected: list[tuple[Any, Any]], intercept: bool, ridge: float, some: bool
) -> None:
    samples, rows = collected(), torch.arange(N) % 4 > 0 if some else None
    options: dict[str, Any] = {"intercept": intercept, "ridge": ridge}
    asked = {} if pairs is None else {"pairs": pairs}
    maps = MapSet.fit(samples, rows=rows, progress=False, **asked, **options)
    taken = torch.arange(N) if rows is None else rows.nonzero()[:, 0]
    assert len(maps) == len(expected)
    plain = {site: vectors[taken] for site, vectors in samples.items()}
    known = MapSet(
        fit_samples(plain, [tuple(map(str, map(Site.parse, pair))) for pair in expected], **options)
    )
    for pair in expected:
        source, target = map(str, map(Site.parse, pair))
        assert same(maps[pair], known[pair])
        weight, bias = least_squares(plain[source], plain[target], intercept, ridge)
        torch.testing.assert_close(maps[pair].weight, weight.float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            maps[pair].bias, None if bias is None else bias.float(), rtol=1e-4, atol=1e-5
        )
    which = {} if rows is None else {"rows": tensor_digest(rows)}
    assert maps.provenance == samples.provenance.with_details(n_fitted=len(taken), **options, **which)


def test_products_are_split_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    parted = list[tuple[int, ...]]()

    def counted(a: Tensor, b: Tensor) -> Tensor:
        parted.append(tuple(b.shape))
        return split_product(a, b)

    monkeypatch.setattr("matlens.linear.least_squares.split_product", counted)
    samples = collected()
    whole = MapSet.fit(samples, progress=False)
    assert not parted
    split = MapSet.fit(samples, split=True, progress=False)
    assert parted
    assert split.provenance == whole.provenance
    for pair, fitted in split.items():
        torch.testing.assert_close(fitted.weight, whole[pair].weight, rtol=1e-5, atol=1e-6)


@pytest.mark.refused
@pytest.mark.parametrize(
    "rows",
    [torch.arange(N), torch.ones(N, 1, dtype=torch.bool), np.ones(N, dtype=bool), [True] * N, slice(0, 3)],
    ids=["numbers", "two axes", "numpy", "list", "slice"],
)
def test_rows_that_are_no_mask_are_refused(rows: Any) -> None:
    """Numbers of rows would otherwise be read as a mask that leaves out row 0."""
    with pytest.raises(InputError, match=r"^rows must be"):
        MapSet.fit(collected(), rows=rows, progress=False)


@pytest.mark.refused
def test_what_cannot_be_fitted_is_refused() -> None:
    samples = collected()
    for options, told in (
        ({"pairs": [(0, "ln1_out.0")]}, r"no vectors of ln1_out\.0; collected were h\.0"),
        ({"pairs": [(2, 1)]}, "the source must lie before the target"),
        ({"pairs": "every"}, r"^pairs must be"),
        (
            {"rows": torch.ones(N - 1, dtype=torch.bool)},
            f"rows must have a value for each of the {N}",
        ),
        ({"rows": torch.zeros(N, dtype=torch.bool)}, "select at least one sample"),
    ):
        with pytest.raises(InputError, match=told):
            MapSet.fit(samples, progress=False, **options)  # type: ignore[arg-type]
    nameless = Activations(dict(samples), samples.examples, "drawn", Provenance())
    with pytest.raises(InputError, match="model that this belongs to is not known"):
        MapSet.fit(nameless, progress=False)


def test_maps_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    weight = torch.eye(4)
    weight[1, 2] = torch.nan
    with pytest.raises(InputError, match=r"h\.0 -> h\.1 cannot be saved: a value of it is not finite"):
        MapSet([LinearMap(weight, None, "h.0", "h.1")]).save(tmp_path / "maps")
    assert not (tmp_path / "maps").exists()


def test_a_low_rank_map_is_saved_as_its_product(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right, h = (torch.randn(*shape, generator=generator) for shape in ((5, 2), (2, 4), (3, 4)))
    low_rank = LinearMap(left, torch.ones(5), "h.0", "h.1", right=right)
    MapSet([low_rank]).save(tmp_path / "maps")
    expected = h.double() @ (left.double() @ right.double()).T + 1
    for mapped in (low_rank, MapSet.load(tmp_path / "maps")[0, 1]):
        torch.testing.assert_close(mapped(h).double(), expected, rtol=1e-5, atol=1e-5)
