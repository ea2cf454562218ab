"""Maps as the authors publish them become maps of this project, number for number."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import D_MODEL, N_LAYERS
from sklearn.linear_model import LinearRegression
from torch import Tensor

from matlens import InputError, MapSet
from matlens.linear.published import convert_published

Models = Callable[[str], Any]


def published(folder: Path) -> dict[tuple[str, str], Tensor]:
    """A folder as the authors' code writes it: the coefficients of scikit-learn, as tensors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, D_MODEL, generator=generator)
    maps = {}

    def write(name: str, *sites: str) -> None:
        y = torch.randn(60, D_MODEL, generator=generator)
        weight = torch.from_numpy(LinearRegression(fit_intercept=False).fit(x, y).coef_)
        (folder / name).write_bytes(pickle.dumps(weight))
        if sites:
            maps[sites[0], sites[1]] = weight

    folder.mkdir()
    for a in range(N_LAYERS):
        for b in range(a + 1, N_LAYERS + 1):
            write(f"{a}_{b}.pickle", f"h.{a}", f"h.{b}")
        for ends, name in {(0, 1): "ln1", (1, 2): "attn", (3, 4): "ln2", (4, 5): "ffn"}.items():
            write(f"p{a}_{ends[0]}_{ends[1]}.pickle", f"{name}_in.{a}", f"{name}_out.{a}")
        write(f"p{a}_2_3.pickle")
    (folder / "README.md").write_text("Not a map.")
    return maps


def test_published_maps_become_maps(small_model: Models, tmp_path: Path) -> None:
    model, expected = small_model("gpt2"), published(tmp_path / "wikipedia")
    maps = convert_published(tmp_path / "wikipedia", model, tmp_path / "maps")
    assert set(maps) == set(expected)
    for pair, weight in expected.items():
        assert torch.equal(maps[pair].weight, weight.float())
        assert maps[pair].bias is None
    again = MapSet.load(tmp_path / "maps")
    assert again.provenance.corpus == "wikipedia"
    assert again.provenance.identity.n_layers == N_LAYERS
    h = torch.randn(2, D_MODEL)
    assert torch.allclose(again[0, -1](h), h @ expected["h.0", f"h.{N_LAYERS}"].float().T, atol=1e-5)


def test_an_intercept_is_kept(small_model: Models, tmp_path: Path) -> None:
    weight, bias = torch.randn(D_MODEL, D_MODEL), torch.randn(D_MODEL)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0_2.pickle").write_bytes(pickle.dumps([weight, bias]))
    (linear,) = convert_published(tmp_path / "in", small_model("bert"), tmp_path / "maps").values()
    assert torch.equal(linear.weight, weight)
    assert linear.bias is not None
    assert torch.equal(linear.bias, bias)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "0_4.pickle",
            torch.zeros(D_MODEL, D_MODEL),
            "from layer 0 to layer 4, and the model has the layers",
        ),
        ("p3_1_2.pickle", torch.zeros(D_MODEL, D_MODEL), "is of no sub-module of this model"),
        ("p0_0_3.pickle", torch.zeros(D_MODEL, D_MODEL), "is of no sub-module of this model"),
        ("0_1.pickle", torch.zeros(D_MODEL, 8), r"shapes \(32, 8\), and the model has 32 coordinates"),
        ("0_1.pickle", torch.zeros(600, 600), "larger than a map of 32 coordinates can be"),
        ("0_1.pickle", os.system, "asks for"),
        ("map.pickle", torch.zeros(D_MODEL, D_MODEL), "holds no published maps. Expected files such as"),
    ],
)
def test_what_are_no_maps_of_the_model_is_refused(
    name: str, value: Any, message: str, small_model: Models, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(pickle.dumps(value))
    with pytest.raises(InputError, match=message):
        convert_published(tmp_path / "in", small_model("gpt2"), tmp_path / "maps")
    with pytest.raises(InputError, match="absent"):
        convert_published(tmp_path / "absent", small_model("gpt2"), tmp_path / "maps")
