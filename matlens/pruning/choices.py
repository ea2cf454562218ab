"""What can be chosen: which blocks are left out, and what becomes of the matrix before them."""

from enum import StrEnum


class Method(StrEnum):
    """What becomes of the matrix before a span that is left out.

    Attributes
    ----------
    out
        Nothing: the blocks are left out alone (ShortGPT).
    magnitude
        Each channel of ``m`` is scaled so that it is as large, on average, as what would be right. It is not
        LinearPatch, which scales the whole stream at the cut and cannot be folded: here ``m`` alone is
        scaled, whatever the signs of what would be right.
    replaceme
        ``T W`` for the matrix ``W``, ``T`` the least-squares map of ``m`` to what would be right (ReplaceMe).
    refit
        The matrix that does best itself: least squares of what it reads to what would be right, with a
        penalty towards ``W``. ``T W`` are the matrices of one rank or less among those it can be.
    chain
        ``refit``, and the same for the FFN of every block that stays behind the first span, one after the
        other: what would be right there is the whole model's own stream. So what is left of the error is
        made good as it goes on, without a step of training.
    """

    out = "out"
    magnitude = "magnitude"
    replaceme = "replaceme"
    refit = "refit"
    chain = "chain"


# Of refitted matrices, which have more numbers than calibration text can settle.
PENALTIES = {Method.refit: 0.1, Method.chain: 0.3}


class Choice(StrEnum):
    """How the blocks to be left out are chosen.

    Attributes
    ----------
    angle
        The span over which the stream turns least: mean angle between ``h^i`` and ``h^{i+n}``.
    r2
        The span that is most linear: greatest r2, over coordinates, of the least-squares affine map of
        ``h^i`` to ``h^{i+n}`` on the tokens that are no attention sinks.
    loss
        The span without which the loss on the calibration text rises least.
    greedy
        Blocks one after the other, each the one without which the loss rises least; they may lie apart. A
        block is tried again only while what it cost when it was last tried, with fewer blocks gone, is below
        the best of the round: it is the least of all where losses rise as blocks go, which they nearly always
        do, and saves most of the passes.
    """

    angle = "angle"
    r2 = "r2"
    loss = "loss"
    greedy = "greedy"
