"""Lenses of one pass are those of all rows at once, whatever is left out, streamed, or merged of parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import D_MODEL, N_LAYERS, assert_near

import matlens
from matlens import InputError, Lens, MapSet
from matlens.activations.activations import Activations
from matlens.activations.sinks import sink_rows
from matlens.lens import moments as lens_sums
from matlens.lens.fitting import lens_moments
from matlens.lens.maps import Standardisation
from matlens.lens.methods import row_keys
from matlens.lens.moments import LensMoments
from matlens.models.identity import Provenance

METHODS = (
    "mat", "affine", "ridge", "ridge-identity", "weighted", "normed", "narrow(4)", "one-jump",
    "normed+affine+narrow(5)", "weighted+ridge",
)  # fmt: skip
WITHOUT = tuple(f"{name} without sinks" for name in ("mat", "ridge", "weighted", "normed", "one-jump"))


@pytest.fixture(scope="module")
def model(small_model: Callable[[str], Any]) -> Any:
    """A model two of whose tokens are sinks."""
    return small_model("llama-sinks")


@pytest.fixture(scope="module")
def data(model: Any) -> Activations:
    """The stream at all tokens of forty sentences."""
    from conftest import make_sentences

    examples = matlens.make_examples(model, make_sentences())
    return matlens.collect(model, examples, positions="all", progress=False)


def assert_same(ours: Lens, theirs: Lens, tolerance: float = 1e-4) -> None:
    h = torch.randn(5, D_MODEL, generator=torch.Generator().manual_seed(1))
    assert ours.layers == theirs.layers
    for layer in ours.layers:
        assert_near(ours(h, layer), theirs(h, layer), tolerance)


def rows_of(data: Activations, name: str) -> torch.Tensor:
    return ~sink_rows(data) if "without" in name else torch.ones(data.n_rows, dtype=torch.bool)


def test_mat_is_the_set_of_maps_that_are_fitted_otherwise(model: Any, data: Activations) -> None:
    names = ["mat", "mat without sinks", "affine", "affine without sinks"]
    lenses = Lens.fit(model, data, method=names)
    assert 0 < int(sink_rows(data).sum()) < data.n_rows // 4
    for name, lens in lenses.items():
        rows = rows_of(data, name)
        expected = MapSet.fit(data, rows=rows, intercept="affine" in name, progress=False)
        assert_same(lens, Lens.from_maps(expected))
        assert lens.n_samples == int(rows.sum())
        assert lens.method == name
    h = data[0][:9]
    assert not torch.allclose(lenses[names[0]](h, 0), lenses[names[1]](h, 0), rtol=1e-2)


def test_lenses_of_too_few_tokens_are_warned_of_once_but_not_with_a_ridge(
    model: Any, data: Activations, recwarn: pytest.WarningsRecorder
) -> None:
    def warnings_of(n: int, *methods: str) -> list[str]:
        recwarn.clear()
        Lens.fit(model, data, method=methods, rows=torch.arange(data.n_rows) < n, progress=False)
        return [str(caught.message) for caught in recwarn if caught.category is matlens.InputWarning]

    warnings.simplefilter("always", matlens.InputWarning)
    for n in (D_MODEL - 1, D_MODEL + 4):
        (message,) = warnings_of(n, "mat", "affine", "normed", "one-jump", "id")
        assert f"{n}" in message
        assert not warnings_of(n, "ridge", "ridge(0.1)", "ridge-identity", "id")
    assert f"of {3 * N_LAYERS + 1} fits" in message  # one-jump is one fit for all layers
    assert not warnings_of(data.n_rows, "normed")
    recwarn.clear()
    Lens.fit(model, data.head(2), method="tuned", progress=False)
    assert [caught.category for caught in recwarn] == [matlens.InputWarning]


@pytest.mark.parametrize(
    "name", ["normed", "weighted", "normed+affine without sinks", "weighted without sinks"]
)
def test_rows_are_weighed_and_standardised_as_defined(name: str, model: Any, data: Activations) -> None:
    lens = Lens.fit(model, data, method=name)
    rows = rows_of(data, name).numpy()
    x, y = (data[layer].double().numpy()[rows] for layer in (1, N_LAYERS))
    if "normed" in name:
        eps = model.cfg.eps
        x, y = (v / np.sqrt((v**2).mean(1, keepdims=True) + eps) for v in (x, y))
        root = np.ones((len(x), 1))
    else:
        root = 1 / np.linalg.norm(y, axis=1, keepdims=True)
    design = np.hstack([x, np.ones((len(x), int("affine" in name)))])
    solution = np.linalg.lstsq(design * root, y * root, rcond=None)[0]
    held = lens.maps[1]
    assert_near(held.matrix(D_MODEL), torch.from_numpy(solution[:D_MODEL].T))
    if "affine" in name:
        assert_near(held.parts["bias"], torch.from_numpy(solution[D_MODEL]))
    assert lens.norm == (Standardisation("rms", model.cfg.eps) if "normed" in name else None)


@pytest.mark.parametrize(
    "name", ["one-jump", "one-jump without sinks", "one-jump+affine", "one-jump+narrow(3)"]
)
def test_one_map_for_all_layers_is_the_fit_on_their_union(name: str, model: Any, data: Activations) -> None:
    lens = Lens.fit(model, data, method=name)
    rows = rows_of(data, name).numpy()
    x = np.vstack([data[layer].double().numpy()[rows] for layer in range(N_LAYERS)])
    y = np.vstack([data[N_LAYERS].double().numpy()[rows]] * N_LAYERS)
    design = np.hstack([x, np.ones((len(x), int("affine" in name)))])
    solution = np.linalg.lstsq(design, y, rcond=None)[0]
    expected = solution[:D_MODEL].T
    if "narrow" in name:
        directions = np.linalg.svd(x @ expected.T, full_matrices=False)[2][:3]
        expected = directions.T @ directions @ expected
    assert_near(lens.maps[2].matrix(D_MODEL), torch.from_numpy(expected), 1e-4)
    assert lens.maps[0] is lens.maps[2]
    assert lens.n_numbers == (6 if "narrow" in name else D_MODEL) * D_MODEL + D_MODEL * ("affine" in name)


def test_streamed_is_collected_and_merged_is_whole(
    model: Any, data: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*METHODS, *WITHOUT]
    whole = Lens.fit(model, data, method=names)
    monkeypatch.setattr(lens_sums, "_CHUNK", 64)
    streamed = lens_moments(model, data.examples, names, batch_tokens=60, progress=False)
    parts = []
    for part in (range(15), range(15, 40)):
        sentences = list(part)
        tokens = np.isin(np.repeat(np.arange(40), data.examples.lengths), sentences)
        moments = LensMoments(data.provenance, names, norm=streamed.norm)
        keys = row_keys(data.examples, drawn=False)
        index = np.flatnonzero(tokens)
        for rows in np.array_split(index, 4):
            vectors = {site: data[site][rows] for site in moments.sites}
            moments.update(vectors, places=data.places[rows], keys=keys[rows])
        parts.append(moments)
    merged = parts[0].merge(parts[1])
    for name in names:
        assert_same(Lens.from_moments(streamed, name), whole[name], 1e-3)
        assert_same(Lens.from_moments(merged, name), whole[name], 1e-3)
        assert Lens.from_moments(merged, name).n_samples == whole[name].n_samples
        assert Lens.from_moments(merged, name).provenance.details.get("strengths") == (
            whole[name].provenance.details.get("strengths")
        )


def some_rows(data: Activations) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(5).random(data.n_rows) < 0.7)


def test_rows_that_are_chosen_are_fitted_as_if_they_were_all(
    model: Any, data: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, names = some_rows(data), [*METHODS, *WITHOUT]
    monkeypatch.setattr(lens_sums, "_CHUNK", 100)
    chosen = Lens.fit(model, data, method=names, rows=rows)
    streamed = Lens.fit(model, data.examples, method=names, rows=rows, batch_tokens=60, progress=False)
    moments = LensMoments(data.provenance, names, norm=chosen["normed"].norm)
    keys = row_keys(data.examples, drawn=False)[rows.numpy()]
    alone = {site: data[site][rows] for site in moments.sites}
    moments.update(alone, places=data.places[rows.numpy()], keys=keys)
    for name in names:
        expected = Lens.from_moments(moments, name)
        for lens in (chosen[name], streamed[name]):
            assert_same(lens, expected, 1e-3)
            assert lens.n_samples == expected.n_samples
            details, others = lens.provenance.details, expected.provenance.details
            assert details.get("strengths") == others.get("strengths")
            assert "rows" in details
    whole = Lens.fit(model, data, method="mat")
    assert not torch.allclose(whole(alone["h.1"], 1), chosen["mat"](alone["h.1"], 1), rtol=1e-2)


def test_a_row_of_weight_two_is_two_rows_and_one_of_weight_zero_is_none(
    model: Any, data: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [
        name.replace("ridge", "ridge(0.1)") if not name.startswith("ridge-") else "ridge-identity(0.1)"
        for name in METHODS
    ]
    times = torch.from_numpy(np.random.default_rng(6).integers(0, 3, data.n_rows))
    monkeypatch.setattr(lens_sums, "_CHUNK", 100)
    lenses = Lens.fit(model, data, method=names, weights=times.float())
    repeated = torch.arange(data.n_rows).repeat_interleave(times)
    moments = LensMoments(data.provenance, names, norm=lenses["normed"].norm)
    moments.update({site: data[site][repeated] for site in moments.sites})
    for name, lens in lenses.items():
        assert_same(lens, Lens.from_moments(moments, name), 1e-3)
        assert lens.n_samples == int((times > 0).sum())
    both = Lens.fit(model, data, method="affine", weights=times.float(), rows=some_rows(data))
    expected = MapSet.fit(data, rows=some_rows(data), weights=times.float(), intercept=True, progress=False)
    assert_same(both, Lens.from_maps(expected))
    assert both.provenance.details["weights"] != lenses["affine"].provenance.details["weights"]


def test_weights_are_merged_with_the_rows_that_they_are_of(model: Any, data: Activations) -> None:
    names = ["mat", "ridge", "weighted+ridge without sinks"]
    weights = torch.from_numpy(np.random.default_rng(7).uniform(0.5, 2, data.n_rows))
    weights[: data.n_rows // 2] = 1  # which are not said of the first part
    whole = Lens.fit(model, data, method=names, weights=weights)
    keys = row_keys(data.examples, drawn=False)
    parts = []
    for rows, of_part in ((slice(data.n_rows // 2), None), (slice(data.n_rows // 2, None), weights)):
        part = LensMoments(data.provenance, names)
        vectors = {site: data[site][rows] for site in part.sites}
        given = None if of_part is None else of_part[rows]
        parts.append(part.update(vectors, places=data.places[rows], keys=keys[rows], weights=given))
    merged = parts[0].merge(parts[1])
    for name in names:
        assert_same(Lens.from_moments(merged, name), whole[name], 1e-3)


def test_leave_one_out_looks_at_the_rows_of_least_keys(
    model: Any, data: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lens_sums, "_HELD", 30)
    monkeypatch.setattr(lens_sums, "_CHUNK", 50)
    moments = lens_moments(model, data, ["ridge", "mat without sinks"], progress=False)
    lens = Lens.from_moments(moments, "ridge")
    keys = row_keys(data.examples, drawn=False)
    clear = moments._held.keys.tolist()
    aside = moments._aside.keys.tolist()
    assert sorted([*clear, *aside])[:30] == sorted(keys.tolist())[:30]
    assert len(lens.provenance.details["strengths"]) == N_LAYERS


def test_drawn_positions_and_chosen_layers(model: Any, small_model: Callable[[str], Any]) -> None:
    bert = small_model("bert")
    from conftest import make_sentences

    examples = matlens.make_examples(bert, make_sentences())
    lens = Lens.fit(bert, examples, method="ridge(0.1)", positions="drawn", layers=[-2], progress=False)
    drawn = matlens.collect(bert, examples, progress=False)
    x, y = (drawn[layer].double() for layer in (2, 3))
    ridge = 0.1 * x.square().sum() / D_MODEL
    expected = torch.linalg.solve(x.T @ x + ridge * torch.eye(D_MODEL), x.T @ y).T
    assert lens.layers == (2,)
    assert_near(lens.maps[2].matrix(D_MODEL), expected.float())
    assert lens.provenance.positions == "drawn"
    corpus = Lens.fit(model, make_sentences(), method="id")
    assert corpus.maps[0].parts == {}
    assert corpus.trajectory("w3 w4").layers == (0, 1, 2, 3)


@pytest.mark.refused
def test_what_cannot_be_fitted_is_refused(
    model: Any, data: Activations, small_model: Callable[[str], Any]
) -> None:
    with pytest.raises(InputError, match="do not belong together"):
        Lens.fit(small_model("llama"), data)
    with pytest.raises(InputError, match="does not begin with a norm"):
        Lens.fit(small_model("bert"), data, method="normed")
    with pytest.raises(InputError, match="is no method of a lens"):
        Lens.fit(model, data, method="best")
    some = matlens.collect(model, data.examples.head(3), [1, 3], progress=False)
    with pytest.raises(InputError, match=r"lack h\.0, h\.2"):
        Lens.fit(model, some)
    assert Lens.fit(model, some, layers=[1], method="ridge(1)").layers == (1,)
    with pytest.raises(InputError, match="at all layers"):
        Lens.fit(model, some, layers=[1], method="mat without sinks")
    with pytest.raises(InputError, match="Expected one or more of 0 to 2"):
        Lens.fit(model, data, layers=[3])
    with pytest.raises(InputError, match="'rows' has 3 values"):
        Lens.fit(model, data, rows=torch.ones(3, dtype=torch.bool))
    with pytest.raises(InputError, match="No sample is left"):
        Lens.fit(model, data.examples, weights=torch.zeros(data.n_rows))
    with pytest.raises(InputError, match="'tuned' is trained"):
        Lens.fit(model, data, method=["mat", "tuned"], rows=torch.ones(data.n_rows, dtype=torch.bool))
    moments = LensMoments(data.provenance, "mat")
    with pytest.raises(InputError, match="No samples"):
        moments.solve("mat")
    with pytest.raises(InputError, match="not among the methods"):
        moments.solve("affine")
    with pytest.raises(InputError, match="cannot be merged"):
        moments.merge(LensMoments(data.provenance, "affine"))
    with pytest.raises(InputError, match="do not belong together"):
        moments.merge(LensMoments(Provenance(Lens.identity(small_model("llama")).provenance.model), "mat"))
    with pytest.raises(InputError, match="no norm is given"):
        LensMoments(data.provenance, "normed")
    with pytest.raises(InputError, match=r"lack h\.0"):
        moments.update({"h.1": torch.ones(2, D_MODEL)})
    vectors = {site: data[site][:4] for site in moments.sites}
    with pytest.raises(InputError, match=r"^weights must be"):
        moments.update(vectors, weights=torch.tensor([1.0, 1.0, 1.0, -1.0]))
    with pytest.raises(InputError, match="3 places"):
        moments.update(vectors, places=np.arange(3))
    with pytest.raises(InputError, match="not finite"):
        moments.update(vectors | {"h.1": torch.full((4, D_MODEL), float("nan"))}).solve("mat")


def test_a_sink_that_was_not_kept_aside_is_not_passed_over(data: Activations) -> None:
    moments = LensMoments(data.provenance, "mat without sinks")
    vectors = {site: torch.ones(2000, D_MODEL) for site in moments.sites}
    moments.update({site: 1000 * values for site, values in vectors.items()})
    moments.update({site: values.repeat(3, 1) for site, values in vectors.items()})
    with pytest.raises(InputError, match="mixed order"):
        moments.solve("mat without sinks")
