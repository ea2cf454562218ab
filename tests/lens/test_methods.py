"""Every closed form is the solution that NumPy finds in float64 from the rows themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from matlens import InputError
from matlens.lens.methods import (
    STRENGTHS,
    HeldRows,
    Method,
    _shrunk,
    check_methods,
    leave_one_out,
    row_keys,
    solve,
)
from matlens.linear.least_squares import LeastSquares

D, N = 6, 40


def rows(n: int = N, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows as streams have them: means far from zero, and coordinates a thousand times larger than others."""
    generator = np.random.default_rng(seed)
    scales = np.array([1000.0, 30.0, 1.0, 1.0, 0.5, 0.1])
    x = (generator.normal(size=(n, D)) + 2) * scales
    y = x @ generator.normal(size=(D, D)) * 0.3 + x + 5 * generator.normal(size=(n, D)) + 3
    return x, y, generator.uniform(0.2, 3, n)


def moments_of(x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None) -> LeastSquares:
    moments = LeastSquares(D, D)
    for part in (slice(0, 7), slice(7, None)):
        of_part = None if weights is None else torch.from_numpy(weights[part])
        moments.update(torch.from_numpy(x[part]), torch.from_numpy(y[part]), weights=of_part)
    return moments


def reference(
    x: np.ndarray,
    y: np.ndarray,
    *,
    weights: np.ndarray | None = None,
    intercept: bool = False,
    ridge: float = 0.0,
    identity: bool = False,
    rank: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias by least squares on stacked rows, the penalty as further rows of data."""
    roots = np.sqrt(np.ones(len(x)) if weights is None else weights)[:, None]
    design = np.hstack([x, np.ones((len(x), int(intercept)))]) * roots
    penalty = np.sqrt(ridge) * np.eye(D, design.shape[1])
    target = np.sqrt(ridge) * np.eye(D) * identity
    solution = np.linalg.lstsq(np.vstack([design, penalty]), np.vstack([y * roots, target]), rcond=None)[0]
    weight, bias = solution[:D].T, solution[D] if intercept else np.zeros(D)
    if rank is not None:
        mean = np.average(x, 0, weights) if intercept else np.zeros(D)
        fitted = (x - mean) @ weight.T * roots
        directions = np.linalg.svd(fitted, full_matrices=False)[2][:rank]
        projection = directions.T @ directions
        centre = bias + weight @ mean
        weight, bias = projection @ weight, centre - projection @ weight @ mean
    return weight, bias


def assert_is(solved: object, weight: np.ndarray, bias: np.ndarray) -> None:
    held = solved.map  # type: ignore[attr-defined]
    matrix = held.matrix(D).double().numpy()
    np.testing.assert_allclose(matrix, weight, rtol=2e-5, atol=1e-5 * np.abs(weight).max())
    given = np.zeros(D) if held.bias is None else held.bias.numpy()
    np.testing.assert_allclose(given, bias, rtol=1e-4, atol=1e-5 * max(np.abs(bias).max(), 1))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mat", {}),
        ("affine", {"intercept": True}),
        ("narrow(2)", {"rank": 2}),
        ("affine+narrow(3)", {"intercept": True, "rank": 3}),
        ("narrow(1)+weighted", {"rank": 1}),
        ("weighted", {}),
        ("weighted+affine", {"intercept": True}),
    ],
)
def test_closed_forms_are_least_squares_on_the_rows(name: str, options: dict[str, object]) -> None:
    x, y, weights = rows()
    used = weights if "weighted" in name else None
    solved = solve(Method.parse(name), moments_of(x, y, used))
    assert_is(solved, *reference(x, y, weights=used, **options))  # type: ignore[arg-type]
    assert solved.strength is None


@pytest.mark.parametrize("target", ["ridge", "ridge-identity"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_ridge_pulls_towards_zero_or_the_identity(target: str, intercept: bool, weighted: bool) -> None:
    x, y, weights = rows()
    used = weights if weighted else None
    name = f"{target}(0.01)" + "+affine" * intercept + "+weighted" * weighted
    mean = np.average(x, 0, used) if intercept else 0
    unit = ((x - mean) ** 2 * (1 if used is None else used[:, None])).sum() / D
    options = {"intercept": intercept, "ridge": 0.01 * unit, "identity": target == "ridge-identity"}
    assert_is(solve(Method.parse(name), moments_of(x, y, used)), *reference(x, y, weights=used, **options))


def test_a_map_as_narrow_as_it_is_wide_is_the_whole_map() -> None:
    x, y, _ = rows()
    narrow, whole = (solve(Method.parse(name), moments_of(x, y)).map for name in (f"narrow({D})", "mat"))
    assert narrow.narrowing is None
    assert torch.equal(narrow.matrix(D), whole.matrix(D))
    two = solve(Method.parse("narrow(2)"), moments_of(x, y)).map
    assert {name: tuple(part.shape) for name, part in two.parts.items()} == {
        "weight": (D, 2), "narrowing": (2, D),
    }  # fmt: skip


def test_the_narrow_map_is_the_best_of_its_rank() -> None:
    x, y, _ = rows()
    best = solve(Method.parse("narrow(2)"), moments_of(x, y)).map.matrix(D).double().numpy()
    error = ((x @ best.T - y) ** 2).sum()
    generator = np.random.default_rng(3)
    left, right = np.linalg.svd(best)[0][:, :2], np.linalg.svd(best)[2][:2]
    for _ in range(50):  # of rank 2 again: near it, and with its best right factor for another left one
        near = left + 1e-3 * generator.normal(size=left.shape)
        basis = np.linalg.qr(near)[0]
        other = basis @ basis.T @ reference(x, y)[0]
        assert ((x @ other.T - y) ** 2).sum() >= error * (1 - 1e-9)
    assert np.linalg.matrix_rank(best, tol=1e-4) == 2
    assert right.shape == (2, D)


@pytest.mark.parametrize(
    "name", ["ridge", "ridge+affine", "ridge-identity", "ridge-identity+affine+weighted"]
)
def test_leaving_one_out_is_fitting_on_all_others(name: str) -> None:
    x, y, weights = rows(14)
    method = Method.parse(name)
    used = weights if method.weighted else None
    held = HeldRows(
        *(torch.from_numpy(part) for part in (x, y)), None if used is None else torch.from_numpy(used)
    )
    errors = leave_one_out(method, moments_of(x, y, used), held, STRENGTHS)
    centre = np.average(x, 0, used) if method.intercept else 0
    unit = ((x - centre) ** 2 * (1 if used is None else used[:, None])).sum() / D
    counts = np.ones(len(x)) if used is None else used
    brute = np.zeros(len(STRENGTHS))
    for s, strength in enumerate(STRENGTHS):
        for i in range(len(x)):
            others = np.arange(len(x)) != i
            weight, bias = reference(
                x[others], y[others], weights=None if used is None else used[others],
                intercept=method.intercept, ridge=strength * unit, identity=method.penalty == "identity",
            )  # fmt: skip
            brute[s] += counts[i] * ((weight @ x[i] + bias - y[i]) ** 2).sum()
    np.testing.assert_allclose(errors.numpy(), brute, rtol=2e-5)
    assert len(set(brute.round(6))) > len(STRENGTHS) // 2  # the strengths make a difference
    solved = solve(method, moments_of(x, y, used), held)
    assert solved.strength == STRENGTHS[int(brute.argmin())]


def test_methods_are_read_from_their_names() -> None:
    method = Method.parse("normed+affine+narrow(64) without sinks")
    assert (method.rows, method.intercept, method.rank, method.sinks) == ("normed", True, 64, False)
    assert Method.parse("id").is_identity
    assert Method.parse("one-jump").shared
    assert Method.parse("ridge").leaves_one_out
    assert not Method.parse("ridge(1e-3)").leaves_one_out
    assert Method.parse("weighted").rows == "weighted"


@pytest.mark.refused
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tune", "is no method of a lens"),
        ("", "is no method of a lens"),
        ("mat(3)", "is no method of a lens"),
        ("affine+affine", "is no method of a lens"),
        ("ridge(1)+ridge(2)", "is no method of a lens"),
        ("narrow", "is no method of a lens"),
        ("narrow(0)", r"^The rank must be"),
        ("narrow(1.5)", r"^The rank must be"),
        ("ridge(-1)", r"^The strength of a ridge must be"),
        ("ridge(nan)", r"number in the name of a method must be"),
        ("id+affine", "nothing can be added"),
        ("weighted+normed", "no weight is needed"),
        ("ridge-identity+narrow(3)", "of full rank"),
    ],
)
def test_what_is_no_method_is_refused(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_methods([name])


@pytest.mark.refused
def test_lists_of_methods_are_refused_where_they_say_nothing() -> None:
    with pytest.raises(InputError, match="Expected one or more, each once"):
        check_methods([])
    with pytest.raises(InputError, match="Expected one or more, each once"):
        check_methods(["mat", "mat"])


def test_keys_of_rows_depend_on_the_sentence_and_the_place_alone() -> None:
    from matlens.data.examples import Examples

    tokens = np.array([5, 6, 7, 8, 5, 6, 7])
    whole = Examples(tokens, np.array([0, 3, 4, 7]), np.array([1, 0, 2]), {})
    every, drawn = row_keys(whole, drawn=False), row_keys(whole, drawn=True)
    assert drawn.tolist() == [every[1], every[3], every[6]]
    assert every[:3].tolist() == every[4:].tolist()
    assert len(set(every.tolist())) == 4
    assert (every >= 0).all()


def test_keys_are_those_of_splitmix64() -> None:
    """Which rows leave-one-out looks at hangs on them, and moments of parts are merged by them."""
    from hashlib import blake2b

    from matlens.data.examples import Examples

    def mixed(tokens: list[int], place: int) -> int:
        content = b"".join(token.to_bytes(8, "little") for token in tokens)
        z = int.from_bytes(blake2b(content, digest_size=8).digest(), "little")
        z = (z + (place + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z >> 1

    sentences = [[5, 6, 7], [8], [300, 2, 70_000, 1]]
    examples = Examples(np.concatenate(sentences), np.array([0, 3, 4, 8]), np.array([1, 0, 3]), {})
    expected = [mixed(tokens, place) for tokens in sentences for place in range(len(tokens))]
    assert row_keys(examples, drawn=False).tolist() == expected
    assert row_keys(examples, drawn=True).tolist() == [expected[i] for i in (1, 3, 7)]


def test_leave_one_out_chooses_among_half_powers_of_ten() -> None:
    np.testing.assert_allclose(STRENGTHS, np.logspace(-10, 2, 25), rtol=1e-12)


def test_directions_that_are_rounding_are_not_blown_up() -> None:
    """Without a penalty what is below the rounding of six coordinates counts as nothing, as in lstsq."""
    eps = torch.finfo(torch.float64).eps
    s, eye = torch.tensor([1, 0.5, 0.1, 7 * eps, 4 * eps, 0]).double(), torch.eye(6).double()
    solution = _shrunk(eye, s, eye, eye, 0.0)
    gains = [1, 2, 10, 1 / (7 * eps), 0, 0]
    torch.testing.assert_close(solution, torch.diag(torch.tensor(gains).double()))
    shrunk = _shrunk(eye, s, eye, eye, 0.25).diagonal()
    assert shrunk[:3].tolist() == pytest.approx([1 / 1.25, 0.5 / 0.5, 0.1 / 0.26])
