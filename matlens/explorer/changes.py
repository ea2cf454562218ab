"""The original model compared with a modified one: the next token, and the continuation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig

from matlens.data.making import Prompt, encode_prompt
from matlens.data.readers import check_decoder
from matlens.errors import InputError, PositiveInt, check_choice, checked, short
from matlens.ffn.control import controlled
from matlens.ffn.values import ValueName, ValueVector
from matlens.linear.mapsets import MapSet
from matlens.models.sites import STREAM, Site
from matlens.models.tokens import token_texts, visible
from matlens.numerics import log_softmax
from matlens.patching.contexts import patched
from matlens.patching.replacements import Replacement, jump, mat_attn, mat_ffn, mat_ln1_ln2, norm_names

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_BY_MAPS: Mapping[str, Callable[[MapSet, int, int], list[Replacement]]] = {
    "mat": jump, "mat_attn": mat_attn, "mat_ffn": mat_ffn, "mat_ln1_ln2": mat_ln1_ln2
}  # fmt: skip
KINDS = {  # label and an example target
    "value": ("coefficient of a value vector", "L3D12"),
    "jump": ("jump over blocks", "4-8"),
    "mat": ("map instead of blocks", "4-8"),
    "attn": ("remove attention in blocks", "7 or 4-8"),
    "ffn": ("remove FFN in blocks", "7 or 4-8"),
    "mat_attn": ("map instead of attention", "7 or 4-8"),
    "mat_ffn": ("map instead of the FFN", "7 or 4-8"),
    "mat_ln1_ln2": ("maps instead of the norms", "7 or 4-8"),
}
_BEST = 10  # tokens of an outcome
_RANGE = re.compile(r"([0-9]{1,4})(?:\s*-\s*([0-9]{1,4}))?")


@checked
@dataclass(frozen=True)
class Change:
    """One change of a model.

    Attributes
    ----------
    kind
        ``"value"`` sets the coefficient of a value vector; ``"jump"`` skips blocks, and ``"mat"`` replaces
        them by one map; ``"attn"`` and ``"ffn"`` set the output of a sub-module to zero, and ``"mat_attn"``,
        ``"mat_ffn"`` and ``"mat_ln1_ln2"`` replace it by its map.
    target
        A name such as ``"L3D12"``; or one block, or blocks such as ``"4-8"``, 8 excluded.
    value
        The coefficient.
    """

    kind: str
    target: str
    value: float = 0.0

    def __post_init__(self) -> None:
        check_choice(self.kind, KINDS, "kind")


@dataclass(frozen=True)
class Outcome:
    """The most probable next tokens of a prompt, with probabilities, and its continuation."""

    tokens: list[tuple[str, float]]
    continuation: str


@checked
def compare_changes(
    model: TransformerBridge,
    prompt: Prompt,
    changes: Sequence[Change],
    *,
    maps: Sequence[MapSet] = (),
    n_tokens: PositiveInt = 20,
) -> tuple[Outcome, Outcome]:
    """Outcomes of a prompt with the original and with the modified model.

    ``prompt`` is as in `matlens.make_prompts`. ``maps`` are sets with maps to use in place of blocks and
    sub-modules, see `offered_maps`.
    """
    before = _outcome(model, prompt, n_tokens)
    with changed_model(model, changes, maps):
        return before, _outcome(model, prompt, n_tokens)


@contextmanager
def changed_model(
    model: TransformerBridge, changes: Sequence[Change], maps: Sequence[MapSet] = ()
) -> Iterator[None]:
    """Run a model with changes, inside a context."""
    kinds = [change for change in changes if change.kind != "value"]
    replacements = [replacement for change in kinds for replacement in _replacements(model, change, maps)]
    coefficients: dict[ValueName, float] = {}
    for change in changes:
        if change.kind == "value":
            vector = ValueVector.parse(change.target)
            if vector in coefficients:
                raise InputError(f"The coefficient of {vector} is set twice.")
            coefficients[vector] = change.value
    with ExitStack() as stack:
        if replacements:
            stack.enter_context(patched(model, replacements))
        if coefficients:
            stack.enter_context(controlled(model, coefficients))
        yield


def offered_maps(maps: Sequence[MapSet]) -> dict[str, list[str]]:
    """The blocks that each kind of change has maps for, such as ``"4-8"`` or ``"7"``."""
    offers: dict[str, list[str]] = {kind: [] for kind in _BY_MAPS}
    for of_set in maps:
        pairs = [(Site.parse(source), Site.parse(target)) for source, target in of_set]
        offers["mat"] += [f"{a.layer}-{b.layer}" for a, b in pairs if a.kind == b.kind == STREAM]
        for kind in ("mat_attn", "mat_ffn", "mat_ln1_ln2"):
            names = norm_names(of_set) if kind == "mat_ln1_ln2" else (kind.removeprefix("mat_"),)
            offers[kind] += [
                str(layer)
                for layer in sorted({a.layer for a, _ in pairs})
                if all((f"{name}_in.{layer}", f"{name}_out.{layer}") in of_set for name in names)
            ]
    return {kind: list(dict.fromkeys(targets)) for kind, targets in offers.items()}


def _replacements(model: TransformerBridge, change: Change, maps: Sequence[MapSet]) -> list[Replacement]:
    n = int(model.cfg.n_layers)
    first, last = _blocks(change.target, n)
    if change.kind == "jump":
        return [Replacement(lambda h: h, Site(STREAM, first), Site(STREAM, last))]
    if change.kind in _BY_MAPS:
        needed = {f"{first}-{last}"} if change.kind == "mat" else set(map(str, range(first, last)))
        for of_set in maps:
            if needed <= set(offered_maps([of_set])[change.kind]):
                return _BY_MAPS[change.kind](of_set, first, last)
        raise InputError(f"No maps for {change.kind} of the blocks {first} to {last - 1} were given.")
    return [
        Replacement(torch.zeros_like, Site(f"{change.kind}_in", layer), Site(f"{change.kind}_out", layer))
        for layer in range(first, last)
    ]


def _blocks(target: str, n: int) -> tuple[int, int]:
    ends = _RANGE.fullmatch(target.strip())
    first = int(ends[1]) if ends else -1
    last = first + 1 if ends is None or ends[2] is None else int(ends[2])
    if not 0 <= first < last <= n:
        raise InputError(
            f"target must be a block from 0 to {n - 1}, or a range up to 0-{n}, got {short(target)}."
        )
    return first, last


@torch.no_grad()
def _outcome(model: TransformerBridge, prompt: Prompt, n_tokens: int) -> Outcome:
    ids = torch.tensor([encode_prompt(model, prompt).ids], device=model.cfg.device)
    text = _continuation(model, ids, n_tokens)
    best = log_softmax(model(ids, return_type="logits")[0, -1].float()).exp().topk(_BEST)
    texts = map(visible, token_texts(model.tokenizer, best.indices.tolist()))
    return Outcome(list(zip(texts, best.values.tolist(), strict=True)), visible(text))


def _continuation(model: TransformerBridge, ids: Int[Tensor, "1 length"], n_tokens: int) -> str:
    """The greedy continuation of a prompt, without the end of the text and the checkpoint's own settings."""
    check_decoder(model, "continues no prompts")
    length, context = ids.shape[1], model.cfg.n_ctx
    if not 0 < length <= context - n_tokens:
        raise InputError(
            f"prompt must have 1 to {context - n_tokens} tokens, so that {n_tokens} more fit into the "
            f"context of {context}, got {length}."
        )
    padding = (model.tokenizer.pad_token_id, model.tokenizer.eos_token_id, 0)
    config = GenerationConfig(
        max_new_tokens=n_tokens, min_new_tokens=n_tokens, do_sample=False, num_beams=1,
        repetition_penalty=1.0, no_repeat_ngram_size=0,
        pad_token_id=next(token for token in padding if token is not None),
    )  # fmt: skip
    new = model.original_model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config
    )
    text = str(model.tokenizer.decode(new[0, length:]))
    (first,) = token_texts(model.tokenizer, new[0, length : length + 1].tolist())
    return f" {text}" if first.startswith(" ") and not text.startswith(" ") else text  # dropped by decoders
