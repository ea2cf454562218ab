"""Methods of pruning, and ways of choosing blocks."""

from enum import StrEnum


class Method(StrEnum):
    """How the matrix before a removed span is replaced.

    Attributes
    ----------
    out
        Nothing: the blocks are only removed (ShortGPT).
    magnitude
        Each channel of ``m`` is scaled to the mean absolute value of the target. It is not LinearPatch, which
        scales the whole stream at the cut and cannot be folded.
    replaceme
        ``T W`` for the matrix ``W``, ``T`` the least-squares map of ``m`` to the target (ReplaceMe).
    refit
        Least squares from the input of the matrix to the target, with a penalty towards ``W``.
    chain
        ``refit``, and the same for the FFN of every later block in turn: the target there is the original
        model's own stream. So later blocks correct the remaining error, without training.
    """

    out = "out"
    magnitude = "magnitude"
    replaceme = "replaceme"
    refit = "refit"
    chain = "chain"


# Refitted matrices have more parameters than calibration text determines.
PENALTIES = {Method.refit: 0.1, Method.chain: 0.3}


class Choice(StrEnum):
    """How the blocks to remove are chosen.

    Attributes
    ----------
    angle
        The span with the smallest mean angle between ``h^i`` and ``h^{i+n}``.
    r2
        The most linear span: greatest mean r2 of the least-squares affine map of
        ``h^i`` to ``h^{i+n}`` on the tokens that are not attention sinks.
    loss
        The span whose removal increases the loss on the calibration text least.
    greedy
        One block at a time, each with the smallest loss increase.
    """

    angle = "angle"
    r2 = "r2"
    loss = "loss"
    greedy = "greedy"
