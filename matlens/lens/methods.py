"""Names of closed forms, what they ask of the data, and the best maps from what was kept of it.

A name is made of words with a plus between them: ``mat``, ``affine``, ``ridge``, ``ridge(0.01)``,
``ridge-identity``, ``weighted``, ``normed``, ``narrow(64)``, ``one-jump``, or ``id`` alone; and at the end
`` without sinks``. ``normed+affine+narrow(64) without sinks`` is one method.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from matlens.data.examples import Examples
from matlens.errors import InputError, check_int, check_number, did_you_mean, short
from matlens.lens.maps import LayerMap
from matlens.linear.least_squares import LeastSquares

Rows = Literal["plain", "weighted", "normed"]
_WORD = re.compile(r"([a-z-]+)(?:\(([^()]*)\))?")
_WITHOUT_SINKS = " without sinks"
_WORDS = "id, mat, affine, ridge, ridge(0.01), ridge-identity, weighted, normed, narrow(64), one-jump"
_CLOSED = ("id", "mat", "affine", "ridge", "ridge-identity", "weighted", "normed", "narrow", "one-jump")
STRENGTHS = tuple(10.0 ** (half / 2) for half in range(-20, 5))
"""Penalties that leave-one-out chooses among, in units of ``mean diag(X'X)``."""


@dataclass(frozen=True)
class Method:
    """A closed form, read from its name.

    Attributes
    ----------
    intercept
        Whether it has one.
    penalty
        What a ridge pulls the map towards: ``"zero"``, ``"identity"``, or ``None`` without one.
    strength
        The ridge in units of ``mean diag(X'X)``; ``None`` where leave-one-out chooses it.
    weighted, normed
        Whether rows weigh ``1 / ||h^L||^2``, and whether both sides are standardised.
    rank
        The greatest rank of the map, or ``None``.
    shared
        Whether one map serves all layers.
    sinks
        Whether attention sinks are among the rows.
    is_identity
        Whether nothing is fitted.
    """

    intercept: bool = False
    penalty: Literal["zero", "identity"] | None = None
    strength: float | None = None
    weighted: bool = False
    normed: bool = False
    rank: int | None = None
    shared: bool = False
    sinks: bool = True
    is_identity: bool = False

    @classmethod
    def parse(cls, name: str) -> Method:
        """Read a name.

        Raises
        ------
        InputError
            It is none.
        """
        stem = name.removesuffix(_WITHOUT_SINKS) if isinstance(name, str) else ""
        values: dict[str, Any] = {"sinks": stem == name}
        words = [_WORD.fullmatch(part.strip()) for part in stem.split("+")]
        if len(words) > len({word[1] for word in words if word is not None}):  # one is none, or given twice
            raise _unknown(name)
        for word in words:
            assert word is not None
            values |= _of_word(word[1], word[2], name)
        if values.get("is_identity") and len(stem.split("+")) > 1:
            raise InputError(f"{short(name)}: 'id' fits nothing, so nothing can be added to it.")
        if values.get("penalty") == "identity" and values.get("rank"):
            raise InputError(
                f"{short(name)}: a map that is pulled towards the identity is of full rank. Expected "
                "'ridge' or 'narrow(r)'."
            )
        if values.get("weighted") and values.get("normed"):
            raise InputError(
                f"{short(name)}: standardised rows are all as long as each other, so no weight is needed. "
                "Expected 'weighted' or 'normed'."
            )
        return cls(**values)

    @property
    def rows(self) -> Rows:
        """Which moments it is solved from."""
        return "weighted" if self.weighted else "normed" if self.normed else "plain"

    @property
    def leaves_one_out(self) -> bool:
        """Whether the strength of its ridge is chosen by leave-one-out."""
        return self.penalty is not None and self.strength is None


def _of_word(word: str, argument: str | None, name: str) -> dict[str, Any]:
    if word in ("ridge", "ridge-identity"):
        number = None if argument is None else _number(argument, name)
        strength = None if number is None else check_number(number, "The strength of a ridge", min=0)
        return {"penalty": "zero" if word == "ridge" else "identity", "strength": strength}
    if word == "narrow":
        number = _number(argument or "", name)
        return {"rank": check_int(int(number) if number % 1 == 0 else number, "The rank", min=1)}
    simple: dict[str, dict[str, Any]] = {
        "id": {"is_identity": True}, "mat": {}, "affine": {"intercept": True}, "weighted": {"weighted": True},
        "normed": {"normed": True}, "one-jump": {"shared": True},
    }  # fmt: skip
    if argument is not None or word not in simple:
        raise _unknown(name)
    return simple[word]


def _number(text: str, name: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise _unknown(name) from None
    return check_number(number, "The number in the name of a method")


def _unknown(name: Any) -> InputError:
    words = name.removesuffix(_WITHOUT_SINKS).split("+") if isinstance(name, str) else []
    suggestions = (did_you_mean(word.strip(), _CLOSED) for word in words if word.strip() not in _CLOSED)
    meant = next(filter(None, suggestions), "")
    return InputError(
        f"{short(name)} is no method of a lens. Expected one of {_WORDS}, or several of these with a plus "
        "between them, such as 'normed+affine'; and ' without sinks' at the end to leave these out." + meant
    )


def check_methods(methods: str | Sequence[str]) -> dict[str, Method]:
    """Read the names of one or several methods.

    Raises
    ------
    InputError
        A name is none, there is none, or one is given twice.
    """
    names = [methods] if isinstance(methods, str) else list(methods)
    if not names or len(set(names)) < len(names):
        raise InputError(f"The methods are {short(names)}. Expected one or more, each once.")
    return {name: Method.parse(name) for name in names}


class HeldRows(NamedTuple):
    """Some rows of a layer, as they entered its moments, and their weights."""

    x: Tensor
    y: Tensor
    weights: Tensor | None


class Solved(NamedTuple):
    """A layer's map, and the strength of the ridge that it has, in units of ``mean diag(X'X)``."""

    map: LayerMap
    strength: float | None


def solve(method: Method, moments: LeastSquares, held: HeldRows | None = None) -> Solved:
    """The map of a method from a layer's moments.

    Parameters
    ----------
    method
        The method.
    moments
        Of the rows that the method asks for.
    held
        Rows among those of the moments, by which leave-one-out chooses the strength of a ridge.
    """
    if moments.n == 0:
        raise InputError(
            f"No samples of {moments.source} -> {moments.target} have been seen, so nothing can be fitted."
        )
    strength = method.strength
    if method.leaves_one_out:
        assert held is not None
        errors = leave_one_out(method, moments, held, STRENGTHS)
        strength = STRENGTHS[int(errors.argmin())]
    weight, bias, root = _full(method, moments, strength)
    if method.rank is None or method.rank >= len(weight):
        return Solved(LayerMap(_kept(weight), bias=None if bias is None else _kept(bias)), strength)
    # The fitted values are the rows of a rotation of root @ weight.T.
    directions = torch.linalg.svd(root @ weight.T, full_matrices=False).Vh[: method.rank]
    left, right = _kept(directions.T), _kept(directions @ weight)
    if bias is not None:  # of the centred fit, whose mean is kept whole
        x_mean, y_mean, _ = moments.means()
        bias = _kept(y_mean - directions.T @ (directions @ (weight @ x_mean)))
    return Solved(LayerMap(left, right, bias), strength)


def _kept(numbers: Tensor) -> Tensor:
    return numbers.to("cpu", torch.float32).contiguous()


def _full(
    method: Method, moments: LeastSquares, strength: float | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Weight, bias, and the factor of the rows that the weight is applied to."""
    r, z = moments.factors(centred=method.intercept)
    if strength is None:
        weight, bias = moments.solution(intercept=method.intercept, ridge=0.0)
        return weight, bias, r
    ridge = strength * float(r.square().sum()) / r.shape[1]
    if method.penalty == "zero":
        weight, bias = moments.solution(intercept=method.intercept, ridge=ridge)
        return weight, bias, r
    u, s, vh = torch.linalg.svd(r, full_matrices=False)
    weight = torch.eye(r.shape[1]).to(r) + _shrunk(u, s, vh, z - r, ridge).T
    if not method.intercept:
        return weight, None, r
    x_mean, y_mean, _ = moments.means()
    return weight, y_mean - weight @ x_mean, r


def _shrunk(u: Tensor, s: Tensor, vh: Tensor, z: Tensor, ridge: float) -> Tensor:
    """The solution of ``min ||r a - z||^2 + ridge ||a||^2`` from the singular values of ``r``."""
    least = torch.finfo(s.dtype).eps * max(len(s), 1) * s.max()
    gain = torch.where(s > least, s / (s.square() + ridge), torch.zeros_like(s))
    return vh.T @ (gain[:, None] * (u.T @ z))


def leave_one_out(
    method: Method, moments: LeastSquares, held: HeldRows, strengths: Sequence[float]
) -> Tensor:
    """Squared errors on held rows, each by the map that is fitted on all other rows, for each strength.

    The error of a row that is left out is that of the fit on all rows, divided by one less its leverage:
    no fit is done anew. A strength is in units of ``mean diag(X'X)`` of all rows. Rows count with their
    weights.
    """
    r, z = moments.factors(centred=method.intercept)
    x, y = held.x.to(r), held.y.to(r)
    weights = x.new_ones(len(x)) if held.weights is None else held.weights.to(r)
    constant = x.new_zeros(len(x))
    if method.intercept:
        x_mean, y_mean, total = moments.means()
        x, y = x - x_mean, y - y_mean
        constant = weights / total
    if method.penalty == "identity":
        y, z = y - x, z - r
    u, s, vh = torch.linalg.svd(r, full_matrices=False)
    turned, loaded = x @ vh.T, u.T @ z
    unit = float(r.square().sum()) / r.shape[1]
    errors = []
    for strength in strengths:
        ridge = strength * unit
        gain = 1 / (s.square() + ridge)
        leverage = constant + weights * (turned.square() * gain).sum(1)
        residual = y - turned @ ((s * gain)[:, None] * loaded)
        kept = (1 - leverage).clamp(min=torch.finfo(s.dtype).eps)
        errors.append((weights * (residual / kept[:, None]).square().sum(1)).sum())
    return torch.stack(errors)


def row_keys(examples: Examples, *, drawn: bool) -> np.ndarray:
    """A number for each row of a collection that looks drawn at random, and is the same wherever it is met.

    It depends on the sentence and the place of the token in it, and on nothing else.
    """
    firsts = []
    for start, end in itertools.pairwise(examples.offsets.tolist()):
        content = np.asarray(examples.tokens[start:end], "<i8").tobytes()
        firsts.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))
    of_sentence = np.asarray(firsts, np.uint64)
    counts = examples.lengths
    sentences = examples.sentences if drawn else np.repeat(np.arange(len(counts)), counts)
    places = np.asarray(examples.positions if drawn else examples.places, np.uint64)
    with np.errstate(over="ignore"):
        keys = of_sentence[sentences] + (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (keys >> np.uint64(1)).astype(np.int64)
