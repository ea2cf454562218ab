"""A model as it is beside the same model changed: the next token, and how the prompt goes on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from matlens.arguments import require_choice, require_number, require_whole, short
from matlens.control.control import Value, controlled
from matlens.control.generation import continue_prompts
from matlens.errors import InputError
from matlens.ffn.values import ValueName, ValueVector
from matlens.linear.mapsets import MapSet
from matlens.models.sites import STREAM, Site
from matlens.models.tokenization import encode_text
from matlens.models.vocabulary import token_texts, visible
from matlens.patching.contexts import patched
from matlens.patching.replacements import Replacement
from matlens.signatures import checked

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

KINDS = ("value", "jump", "attn", "ffn")
_RANGE = re.compile(r"([0-9]{1,4})\s*-\s*([0-9]{1,4})")
_BLOCK = re.compile(r"[0-9]{1,4}")


@checked
@dataclass(frozen=True)
class Change:
    """One change of a model.

    Attributes
    ----------
    kind
        ``"value"`` sets the coefficient of a value vector, ``"jump"`` leaves blocks out, ``"attn"`` and
        ``"ffn"`` make a sub-module write nothing.
    which
        A name such as ``"L3D12"``; blocks such as ``"4-8"``, of which the first is left out and the last is
        the first that runs again; the number of a block.
    value
        The coefficient.
    """

    kind: str
    which: str
    value: float = 0.0

    def __post_init__(self) -> None:
        require_choice(self.kind, KINDS, "kind")
        require_number(self.value, "value")


@dataclass(frozen=True)
class Outcome:
    """What a model predicts behind a prompt, with probabilities, and how it goes on."""

    tokens: list[tuple[str, float]]
    continuation: str


@checked
def compare_changes(
    model: TransformerBridge,
    prompt: str,
    changes: Sequence[Change],
    *,
    maps: MapSet | None = None,
    k: int = 10,
    n_tokens: int = 20,
    proceed: Callable[[], None] | None = None,
) -> tuple[Outcome, Outcome]:
    """What a model predicts as it is, and changed.

    Parameters
    ----------
    model, prompt
        A decoder, and a text that it goes on with.
    changes
        What is changed, all at once.
    maps
        Where there is a map over the blocks of a jump, it stands in for them; without, their input passes on.
    k, n_tokens
        How many tokens are listed, and how many the continuation has.
    proceed
        Called between two steps; what it raises ends the work.

    Raises
    ------
    InputError
        The prompt cannot be read, or a change is none of this model or touches what another changes.
    """
    require_whole(k, "k", least=1, most=model.cfg.d_vocab_out)
    wanted = [_replacement(model, change, maps) for change in changes if change.kind != "value"]
    coefficients: dict[ValueName, Value] = {}
    for change in changes:
        if change.kind == "value":
            vector = ValueVector.parse(change.which)
            if vector in coefficients:
                raise InputError(f"The coefficient of {vector} is set twice. Expected one value for each.")
            coefficients[vector] = change.value
    outcomes = []
    for changed in (False, True):
        with ExitStack() as stack:
            if changed and wanted:
                stack.enter_context(patched(model, wanted))
            if changed and coefficients:
                stack.enter_context(controlled(model, list(coefficients), coefficients))
            outcomes.append(_outcome(model, prompt, k, n_tokens, proceed or (lambda: None)))
    return outcomes[0], outcomes[1]


def _replacement(model: TransformerBridge, change: Change, maps: MapSet | None) -> Replacement:
    n = int(model.cfg.n_layers)
    if change.kind == "jump":
        ends = _RANGE.fullmatch(change.which)
        source, target = (int(ends[1]), int(ends[2])) if ends else (0, 0)
        if not 0 <= source < target <= n:
            raise InputError(
                f"{short(change.which)} is no range of layers. Expected such as 4-8, up to 0-{n}."
            )
        if maps is not None and (source, target) in maps:
            return Replacement.from_map(maps[source, target])
        return Replacement(lambda h: h, Site(STREAM, source), Site(STREAM, target))
    if not _BLOCK.fullmatch(change.which) or int(change.which) >= n:
        raise InputError(f"{short(change.which)} is no block. Expected 0 to {n - 1}.")
    layer = int(change.which)
    return Replacement(torch.zeros_like, Site(f"{change.kind}_in", layer), Site(f"{change.kind}_out", layer))


@torch.inference_mode()
def _outcome(
    model: TransformerBridge, prompt: str, k: int, n_tokens: int, proceed: Callable[[], None]
) -> Outcome:
    proceed()
    text = str(continue_prompts(model, [prompt], n_tokens=n_tokens, progress=False)["text"].iloc[0])
    proceed()
    ids = torch.tensor([encode_text(model, prompt).ids], device=model.cfg.device)
    best = model(ids, return_type="logits")[0, -1].float().softmax(-1).topk(k)
    texts = map(visible, token_texts(model.tokenizer, best.indices.tolist()))
    return Outcome(list(zip(texts, best.values.tolist(), strict=True)), visible(text))
