"""What can be done with a model: tried on it, and not looked up by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from matlens.activations.collecting import collect
from matlens.data.examples import Examples
from matlens.data.making import make_image_examples
from matlens.data.token_examples import make_token_examples
from matlens.errors import InputError, checked
from matlens.ffn.control import controlled
from matlens.ffn.updates import Updates
from matlens.ffn.values import ValueVectors
from matlens.linear.mapsets import MapSet
from matlens.models.families.encoder_decoders import DECODER, stack_of
from matlens.models.families.vision import is_visual
from matlens.models.layout import ModelLayout, probe_inputs
from matlens.models.readout import Readout
from matlens.patching.contexts import patched
from matlens.patching.replacements import jump, mat_attn, mat_ffn, mat_ln1_ln2
from matlens.patching.submodules import submodule_pairs

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

FEATURES = (
    "read-out",
    "mat",
    "mat_attn",
    "mat_ffn",
    "mat_ln1_ln2",
    "value vectors",
    "sub-updates",
    "control",
)
_STAND_INS = {"mat_attn": mat_attn, "mat_ffn": mat_ffn, "mat_ln1_ln2": mat_ln1_ln2}


@checked
def compatibility(model: TransformerBridge) -> dict[str, str]:
    """What matlens can do with a model, found by doing it on a few tokens.

    Returns
    -------
    dict
        ``wiring``, how its blocks are wired; ``sites``, the kinds of sites that it has; and for each of
        `FEATURES` an empty text where it works, and otherwise the reason why it is refused.
    """
    layout = ModelLayout.from_model(model)
    probe, _ = probe_inputs(model)
    examples = _examples(model, probe)
    stream = collect(model, examples, progress=False)

    def read_out() -> None:
        Readout(model).logits(stream[layout.stream[-1]])

    def run_patched(pairs: Callable[[], Any], replace: Callable[..., Any]) -> None:
        sites = sorted({site for pair in pairs() for site in pair})
        inside = collect(model, examples, sites=sites, progress=False)
        with patched(model, replace(MapSet.fit(inside, pairs=pairs()), 0, layout.n_layers)):
            model(probe, return_type=None)

    def set_coefficient() -> None:
        with controlled(model, [ValueVectors(model).at(0)]):
            model(probe, return_type=None)

    attempts: dict[str, Callable[[], Any]] = {
        "read-out": read_out,
        "mat": partial(run_patched, lambda: [("h.0", str(layout.stream[-1]))], jump),
        **{
            name: partial(run_patched, partial(_pairs_of, layout, name), replace)
            for name, replace in _STAND_INS.items()
        },
        "value vectors": lambda: ValueVectors(model).layer(0),
        "sub-updates": lambda: Updates.run(model, examples, progress=False).dominant(0, 1),
        "control": set_coefficient,
    }
    return {
        "wiring": layout.wiring.name,
        "sites": ", ".join(("h", *layout.kinds)),
        **{name: _refusal(attempts[name]) for name in FEATURES},
    }


def _examples(model: TransformerBridge, probe: Tensor) -> Examples:
    if is_visual(model):
        return make_image_examples(model, probe)
    every = torch.ones_like(probe, dtype=torch.bool)
    sources = probe.tolist() if stack_of(model) == DECODER else None
    return make_token_examples(model, probe, attention_mask=every.long(), positions=every, sources=sources)


def _pairs_of(layout: ModelLayout, name: str) -> list[tuple[str, str]]:
    parts = name.split("_")[1:]
    pairs = submodule_pairs(layout, parts)
    if not pairs:
        raise InputError(
            f"Not every block of this model has a module for {' and '.join(parts)} whose input and output "
            "are known: some have another one in its place, such as linear attention or a convolution. "
            f"The sites of all its blocks are {', '.join(layout.kinds)}."
        )
    return pairs


def _refusal(attempt: Callable[[], Any]) -> str:
    try:
        with torch.inference_mode():
            attempt()
    except InputError as error:
        return str(error)
    return ""
