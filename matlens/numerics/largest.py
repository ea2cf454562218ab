"""The largest of many numbers in each row, without ordering all of them."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

_FEW = 16  # numbers in a group that are not worth it


def largest(scores: Float[Tensor, "n m"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The ``k`` largest numbers of each row and where they stand, the largest first, as by `torch.topk`.

    They are in the ``k`` groups whose largest numbers are largest, so only these are ordered. Of equal
    numbers any may be taken.
    """
    n, m = scores.shape
    # As many groups as there are numbers in k of them, or up to twice as many.
    n_groups = 2 ** math.ceil(math.log2(max(k * m, 1)) / 2)
    whole = m // n_groups * n_groups
    if whole < _FEW * n_groups or 4 * k > n_groups:
        top = scores.topk(k)
        return top.values, top.indices
    # A group has every n_groups-th number of a row.
    groups = scores[:, :whole].unflatten(1, (-1, n_groups)).amax(1).topk(k).indices
    steps = torch.arange(0, whole, n_groups, device=scores.device)
    rest = torch.arange(whole, m, device=scores.device).expand(n, -1)
    places = torch.cat([(groups[:, :, None] + steps).flatten(1), rest], 1)
    values, order = scores.gather(1, places).topk(k)
    return values, places.gather(1, order)
