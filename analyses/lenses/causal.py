"""The residual stream moved along what lenses read, and what the model answers then."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from studies import Model
from torch import Tensor

from matlens import Lens, Site, patched
from matlens.activations import Activations
from matlens.data import Examples
from matlens.patching import Replacement

TRANSPOSE, PSEUDO_INVERSE = "transpose", "pseudo-inverse"
MODEL, RANDOM = ("model", TRANSPOSE), ("random", "")
N_RANDOM = 2


@dataclass(frozen=True)
class Prompts:
    """Prompts that a model answers: their templates, and the tokens of answers and rivals."""

    examples: Examples
    template: list[str]
    answer: Int[Tensor, " n"]
    rival: Int[Tensor, " n"]


class LaterBlocks:
    """The blocks after a layer, run at the last token of prompts on vectors in place of the stream's."""

    def __init__(self, model: Model, layer: int) -> None:
        self.model, self.given = model, torch.empty(0)
        self.replacement = Replacement(lambda _: self.given, Site("h", 0), Site("h", layer))

    @torch.no_grad()
    def read(self, tokens: Int[Tensor, " length"], h: Float[Tensor, "length d"]) -> Any:
        """Keys and values of a prompt without its last token, from its stream."""
        self.given = h[None].to(self.model.cfg.device)
        return self.model(tokens[None].to(self.given.device), return_type="logits_and_cache")[1]

    def logits(
        self, h: Float[Tensor, "k d"], *, token: Int[Tensor, ""], past: Any
    ) -> Float[Tensor, "k d_vocab"]:
        """Logits after a prompt for each of some vectors at its last token."""
        self.given, past = h[:, None].to(self.model.cfg.device), copy.deepcopy(past)
        past.batch_repeat_interleave(len(h))
        token = token.to(self.given.device).expand(len(h), 1)
        logits: Tensor = self.model(token, past_key_values=past)
        return logits[:, -1].float().cpu()


def logit_difference(
    logits: Float[Tensor, "n d_vocab"], rival: Int[Tensor, " *n"], answer: Int[Tensor, " *n"]
) -> Float[Tensor, " n"]:
    """The rival's logit less the answer's."""
    rows = torch.arange(len(logits))
    return logits[rows, rival] - logits[rows, answer]


def gradient(
    logits: Callable[[Tensor], Tensor], h: Float[Tensor, "n d"], rival: Tensor, answer: Tensor
) -> Float[Tensor, "n d"]:
    """Gradient of the logit difference of each vector."""
    h = h.detach().clone().requires_grad_()
    return torch.autograd.grad(logit_difference(logits(h), rival, answer).sum(), h)[0]


def direction_names(lenses: Iterable[str]) -> list[tuple[str, str]]:
    """Lens and kind of each direction that is not random; both kinds of ``id`` are the same."""
    kinds = ((name, kind) for name in lenses for kind in (TRANSPOSE, PSEUDO_INVERSE))
    return [*(key for key in kinds if key != ("id", PSEUDO_INVERSE)), MODEL]


def lens_directions(
    lens: Lens, layer: int, h: Float[Tensor, "n d"], rival: Tensor, answer: Tensor
) -> dict[str, Float[Tensor, "n d"]]:
    """By kind, the directions that raise the rival above the answer for a lens.

    ``transpose`` is the gradient of the lens's logit difference at ``h``, through its map, its norms and the
    readout; ``pseudo-inverse`` is what the pseudo-inverse of its matrix makes of the readout's gradient at
    the vector that ``h`` is mapped to.
    """
    readout = partial(lens.on_readout.logits, gradients=True)
    after = gradient(readout, lens(h, layer), rival, answer)
    return {
        TRANSPOSE: gradient(partial(lens.logits, layer=layer, gradients=True), h, rival, answer),
        PSEUDO_INVERSE: (after.double() @ torch.linalg.pinv(lens.matrix(layer).double()).T).float(),
    }


def move_stream(
    model: Model,
    lenses: Mapping[str, Lens],
    layer: int,
    prompts: Prompts,
    vectors: Activations,
    *,
    doses: Sequence[float],
    seed: int,
) -> dict[str, Tensor]:
    """What lenses read at the last token of prompts, and what the model answers if that vector is moved.

    Directions are those of `direction_names`, the last of them the gradient of the model's own logit
    difference, and then random ones. A move of dose 1 is as long as the vector.

    - ``above``, ``first`` ``[n, lens]``: whether a lens reads the answer above the rival, and as its top
      token
    - ``top``, ``difference`` ``[n, direction, dose]``: whether the rival is the model's top token, and the
      model's logit difference, rival less answer; without a move it is ``before`` ``[n]``
    - ``claimed`` ``[n, direction]``: what dose 1 adds to that difference by the gradient of the lens, or of
      the model; no random directions

    Parameters
    ----------
    vectors
        The stream at all tokens of the prompts.
    """
    rival, answer, ends = prompts.rival, prompts.answer, torch.from_numpy(prompts.examples.offsets[1:-1])
    stream = vectors[layer].float().tensor_split(ends)
    tokens = torch.from_numpy(prompts.examples.tokens).tensor_split(ends)
    h = torch.stack([each[-1] for each in stream])
    lengths, longer = h.norm(dim=-1), torch.tensor(doses)[:, None]
    readings = [lens.logits(h, layer).cpu() for lens in lenses.values()]
    directions = {
        (name, kind): along
        for name, lens in lenses.items()
        for kind, along in lens_directions(lens, layer, h, rival, answer).items()
    }
    blocks, before, difference, top = LaterBlocks(model, layer), [], [], []
    with patched(model, [blocks.replacement]):
        runs = [
            partial(blocks.logits, token=ids[-1], past=blocks.read(ids[:-1], each[:-1]))
            for ids, each in zip(tokens, stream, strict=True)
        ]
        own = zip(runs, h.split(1), rival.split(1), answer.split(1), strict=True)
        directions[MODEL] = torch.cat([gradient(*each) for each in own])
        names = direction_names(lenses)
        random = torch.randn(N_RANDOM, *h.shape, generator=torch.Generator().manual_seed(seed))
        along = torch.stack([*(directions[name] for name in names), *random], dim=1)
        along = torch.nn.functional.normalize(along, dim=-1)
        for i, run in enumerate(runs):
            moves = lengths[i] * longer * along[i, :, None]
            with torch.no_grad():
                logits = run(torch.cat([h[i, None], h[i] + moves.flatten(0, 1)]))
            differences = logit_difference(logits, rival[i], answer[i])
            before.append(differences[0])
            difference.append(differences[1:].view(moves.shape[:2]))
            top.append((logits[1:].argmax(-1) == rival[i]).view(moves.shape[:2]))
    slopes = torch.stack([directions[lens, TRANSPOSE] for lens, _ in names], dim=1)
    return {
        "above": torch.stack([logit_difference(each, rival, answer) < 0 for each in readings], dim=1),
        "first": torch.stack([each.argmax(-1) == answer for each in readings], dim=1),
        "before": torch.stack(before), "difference": torch.stack(difference), "top": torch.stack(top),
        "claimed": lengths[:, None] * (slopes * along[:, : len(names)]).sum(-1),
    }  # fmt: skip
