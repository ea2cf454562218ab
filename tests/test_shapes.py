"""A wrong shape in a call of a public function is an error while tests run, in every room that has arrays."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from annotation import find_patterns
from jaxtyping import TypeCheckError

import matlens
from matlens import InputError, metrics
from matlens.activations import outlying_rows
from matlens.data import Examples
from matlens.data.judged import JudgedText
from matlens.explorer.usage import Usage
from matlens.ffn import Projection
from matlens.lens import divergence, exit_layers, matrix_cosine
from matlens.linear import LeastSquares, LinearMap
from matlens.linearity.scores import held_out_scores
from matlens.models import Readout
from matlens.models.families.mixtures import Mixture
from matlens.models.families.wikilm.modelling import SinusoidalPositions
from matlens.numerics import split_product
from matlens.patching import Scheme, r2_score
from matlens.plots.page_trajectory import LensCells
from matlens.pruning.evaluation import read_text
from matlens.pruning.spans import angles

# What says so: the package to every user where it can, and otherwise the annotations to its tests.
WRONG = (InputError, TypeCheckError)
SCHEME = Scheme((0, 1, 2), "blocks")

# A public function, and the shapes of what it is given: those it is for, and those that do not fit.
CALLS: dict[str, tuple[Callable[..., object], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "metrics.r2": (metrics.r2, [(10, 3), (10, 3)], [(10, 3), (10, 4)]),
    "linear.LeastSquares.update": (
        lambda x, y: LeastSquares(3, 2).update(x, y),
        [(9, 3), (9, 2)],
        [(9, 3), (8, 2)],
    ),
    "linear.LinearMap": (lambda w, b: LinearMap(w, b, "h.0", "h.1"), [(4, 3), (4,)], [(4, 3), (3,)]),
    "activations.outlying_rows": (outlying_rows, [(10, 3)], [(10,)]),
    "numerics.split_product": (split_product, [(5, 3), (5, 4)], [(5, 3), (6, 4)]),
    "patching.r2_score": (lambda r2: r2_score(SCHEME, r2), [(3, 3)], [(3, 4)]),
    "estimators.divergence": (divergence, [(3, 5), (3, 5)], [(3, 5), (3, 5, 1)]),
    "lens.exit_layers": (exit_layers, [(10, 4), (10,)], [(10, 4), (11,)]),
    "lens.matrix_cosine": (matrix_cosine, [(4, 3), (4, 3)], [(4, 3), (4, 2)]),
    "pruning.angles": (angles, [(4, 3), (4, 3)], [(4, 3), (2, 3)]),
}


def test_cells_of_pages_have_the_shape_of_their_grid() -> None:
    ids, real, flat = np.ones((3, 4, 5), int), np.ones((3, 4, 5)), np.ones((3, 4))
    LensCells(ids, real, flat, flat, flat.astype(int), ids, real)
    with pytest.raises(WRONG):
        LensCells(ids, real, flat[:2], flat, flat.astype(int), ids, real)


def test_uses_have_four_axes() -> None:
    sentence, dominant = torch.ones(2, 3, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)
    coefficients = torch.ones(2, 3, 4, 6, dtype=torch.long)
    Usage(sentence, sentence.float(), coefficients, dominant, 7)
    with pytest.raises(WRONG):
        Usage(sentence, sentence.float(), coefficients[0], dominant, 7)


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_shape_is_an_error(name: str) -> None:
    call, right, wrong = CALLS[name]
    call(*map(torch.rand, right))
    with pytest.raises(WRONG):
        call(*map(torch.rand, wrong))


def test_a_wrong_shape_is_an_error_in_functions_of_a_model(small_model: Callable[[str], Any]) -> None:
    model = small_model("gpt2")
    h = torch.rand(4, model.cfg.d_model)
    readout, projection = Readout(model), Projection.from_model(model)
    assert len(readout.top_tokens(h[0], k=2)) == 2
    with pytest.raises(WRONG, match=r"^h must be"):
        readout.top_tokens(h, k=2)
    assert projection.top(h, k=2).ids.shape == (4, 2)
    with pytest.raises(WRONG, match=r"top|vectors"):
        projection.top(h[0], k=2)


def test_a_wrong_shape_is_an_error_in_arrays_of_numpy() -> None:
    tokens, offsets, positions = np.arange(6), np.array([0, 2, 6]), np.array([1, 3])
    assert len(Examples(tokens, offsets, positions)) == 2
    with pytest.raises(WRONG, match="tokens"):
        Examples(tokens[None], offsets, positions)
    with pytest.raises(WRONG, match="ids"):
        find_patterns(torch.arange(6), None, None)


def test_right_tokens_are_one_a_position() -> None:
    examples = Examples(np.arange(6), np.array([0, 2, 6]), np.array([1, 3]))
    assert JudgedText(examples, np.array([4, 5])).examples.n_positions == 2
    with pytest.raises(WRONG):
        JudgedText(examples, np.array([[4], [5]]))


def test_tokens_of_a_judged_text_are_a_row_a_window() -> None:
    with pytest.raises(WRONG):
        read_text(None, torch.ones(5, dtype=torch.long), desc="", progress=False)


def test_a_wrong_dtype_is_an_error() -> None:
    with pytest.raises(WRONG, match="token"):
        metrics.rank(torch.rand(10, 7), torch.rand(10))


def test_what_a_map_gives_is_as_much_as_the_truth() -> None:
    with pytest.raises(WRONG):
        held_out_scores(torch.rand(4, 3), torch.rand(5, 3))


def test_coefficients_of_experts_are_of_the_same_tokens() -> None:
    mixture = object.__new__(Mixture)  # shapes are looked at before it is
    with pytest.raises(WRONG):
        mixture.coefficients(torch.rand(4, 3), torch.zeros(5, 2, dtype=torch.long), torch.rand(4, 2))


def test_positions_of_wikilm_are_a_row_a_text() -> None:
    assert SinusoidalPositions(4, 1)(torch.ones(2, 5, dtype=torch.long)).shape == (2, 5, 4)
    with pytest.raises(WRONG):
        SinusoidalPositions(4, 1)(torch.ones(5, dtype=torch.long))


def test_every_room_that_has_arrays_is_tried() -> None:
    package, here = Path(matlens.__file__).parent, Path(__file__).read_text()
    rooms = {path.parent.name for path in package.glob("*/*.py") if "jaxtyping import" in path.read_text()}
    assert not {room for room in rooms if not re.search(rf"from matlens\.{room}[. ]", here)}


@pytest.mark.refused
def test_shapes_are_not_checked_where_a_test_is_about_what_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be compared"):
        metrics.r2(torch.rand(10, 3), torch.rand(10, 4))
