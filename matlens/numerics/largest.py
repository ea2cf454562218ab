"""The largest of many numbers in each row, without ordering all of them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

_GROUPS = 1024  # of the numbers of a row: each with every 1024th
_FEW = 16  # numbers in a group that are not worth it


def largest(scores: Float[Tensor, "n m"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The ``k`` largest numbers of each row and where they stand, the largest first, as by `torch.topk`.

    They are in the ``k`` groups whose largest numbers are largest, so only these are ordered. Of equal
    numbers any may be taken.
    """
    n, m = scores.shape
    whole = m // _GROUPS * _GROUPS
    if whole < _FEW * _GROUPS or 4 * k > _GROUPS:
        top = scores.topk(k)
        return top.values, top.indices
    groups = scores[:, :whole].unflatten(1, (-1, _GROUPS)).amax(1).topk(k).indices
    steps = torch.arange(0, whole, _GROUPS, device=scores.device)
    rest = torch.arange(whole, m, device=scores.device).expand(n, -1)
    places = torch.cat([(groups[:, :, None] + steps).flatten(1), rest], 1)
    values, order = scores.gather(1, places).topk(k)
    return values, places.gather(1, order)
