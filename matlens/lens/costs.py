"""What a lens costs: numbers kept, and multiplications and additions of its fit, counted from its sizes."""

from __future__ import annotations

from matlens.errors import NonNegativeInt, PositiveInt, checked


@checked
def closed_form_flops(n: PositiveInt, d: PositiveInt) -> int:
    """Floating-point operations of least squares for one layer: ``n`` rows factorised, and solved.

    Householder's ``QR`` of ``[x 1]`` with ``Q`` written out takes ``4 n d^2 - 4/3 d^3``, ``Q'y`` takes
    ``2 n d^2``, and solving the triangle ``d^3``.
    """
    n, d = n, d
    return round(6 * n * d**2 - d**3 / 3) if n >= d else 6 * d * n**2


@checked
def training_flops(
    rows: NonNegativeInt,
    d: PositiveInt,
    tokens: PositiveInt,
    *,
    pilot: NonNegativeInt = 0,
    d_vocab: NonNegativeInt = 0,
) -> int:
    """Those of steps down the divergence, over all steps of one layer.

    A row is mapped, and its gradient goes back into the map: ``4 d^2``. It is read out, the gradient goes
    back through the read-out, and ``h^L`` is read out beside it: ``6 d`` for each token. A row of the pilot
    is mapped once and read out twice over the whole vocabulary.

    Parameters
    ----------
    rows
        Rows of all steps together; one that is seen twice counts twice.
    d
        The model's width.
    tokens
        Tokens that are read out.
    pilot, d_vocab
        Rows that are read out before, over so many tokens.
    """
    rows, d = rows, d
    tokens, pilot = tokens, pilot
    return rows * (4 * d**2 + 6 * d * tokens) + pilot * (2 * d**2 + 4 * d * d_vocab)


@checked
def jacobian_flops(
    tokens: PositiveInt, d: PositiveInt, parameters: PositiveInt, *, at_once: PositiveInt = 8
) -> int:
    """Those of Jacobians for all layers together: a pass back through all blocks for each coordinate.

    Attention's own products and norms are left out: they are a few hundredths at the lengths of sentences.

    Parameters
    ----------
    tokens
        Tokens of all prompts.
    d
        The model's width.
    parameters
        Numbers in the matrices of the blocks.
    at_once
        Coordinates of a pass, each of which needs a copy of the pass before it.
    """
    tokens, d = tokens, d
    return 2 * tokens * parameters * (d + at_once)
