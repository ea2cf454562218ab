"""A model whose weights are edited is another model for all that was made before, and dropout is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import D_MODEL, make_sentences
from control.generation import continue_prompts

import matlens
from matlens import InputError, MapSet, Readout, Site, ffn, linear
from matlens.activations import stream
from matlens.data import Corpus
from matlens.ffn import text_losses
from matlens.patching.replacements import Replacement

H = torch.randn(3, D_MODEL, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def work(model_folder):
    """A model, and what is made of it."""
    model = matlens.load(str(model_folder("gpt2")), device="cpu")
    examples = matlens.make_examples(model, make_sentences()).head(8)
    activations = matlens.collect(model, examples, progress=False)
    maps = MapSet.fit(activations, pairs="last", progress=False)
    return SimpleNamespace(
        model=model, examples=examples, activations=activations, maps=maps, readout=Readout(model),
        lens=matlens.Lens.from_maps(maps, model=model), values=ffn.ValueVectors(model),
        projection=ffn.Projection.from_model(model), normed=ffn.Projection.after_norm(model),
    )  # fmt: skip


HEAD: dict[str, Callable[[Any], Any]] = {
    "Readout.logits": lambda w: w.readout.logits(H),
    "Readout.top_ids": lambda w: w.readout.top_ids(H),
    "Readout.top_ids_and_ranks": lambda w: w.readout.top_ids_and_ranks(H, torch.tensor([1, 2, 3])),
    "Lens.logits": lambda w: w.lens.logits(H, 1),
    "Lens.trajectory": lambda w: w.lens.trajectory("w1 w2"),
    "prediction_quality": lambda w: matlens.lens.prediction_quality(w.readout, w.maps, w.activations),
    "Projection.scores": lambda w: w.projection.scores(H),
    "Projection.top": lambda w: w.normed.top(H, 2),
    "values_promoting": lambda w: w.projection.promoting(w.values, ["w3"], progress=False),
}
FFN: dict[str, Callable[[Any], Any]] = {
    "ValueVectors.layer": lambda w: w.values.layer(1),
    "ValueVectors.vectors": lambda w: w.values.vectors(["L1D3"]),
    "ValueVectors.bias": lambda w: w.values.bias(1),
    "ValueVectors.norms": lambda w: w.values.norms(1),
}


@contextmanager
def edited(model: Any, part: str) -> Iterator[None]:
    """Edit one of the head's or an FFN's weights in place."""
    module = model.unembed if part == "head" else model.blocks[1].mlp.out
    weight = module.original_component.weight.data
    before = weight.clone()
    weight.view(-1)[7:8].add_(1e-3)
    try:
        yield
    finally:
        weight.copy_(before)


@pytest.mark.parametrize(("part", "uses"), [("head", HEAD), ("ffn", FFN)])
def test_what_was_made_before_an_edit_is_refused_after_it(part, uses, work):
    untouched = work.values.layer(0)
    with edited(work.model, part):
        for name, use in uses.items():
            with pytest.raises(InputError):
                print(name, use(work))
        assert torch.equal(work.values.layer(0), untouched)
    for use in uses.values():
        use(work)


def test_weights_edited_within_a_loop_that_checks_once_are_noticed_at_its_end(work):
    def edit_inside(stack: ExitStack) -> None:
        with work.readout.weights.constant():
            stack.enter_context(edited(work.model, "head"))
            work.readout.logits(H)

    with ExitStack() as stack, pytest.raises(InputError):
        edit_inside(stack)


# Whose maps they are


def test_maps_of_no_known_model_are_refused_where_a_model_is_given(work):
    rows = stream(work.model, work.examples, ["h.0", "h.3"], progress=False)
    maps = MapSet(linear.fit_stream((part.vectors for part in rows), [("h.0", "h.3")]))
    refused: list[Callable[[], Any]] = [
        lambda: matlens.patched(work.model, matlens.jump(maps, 0, 3)).__enter__(),
        lambda: matlens.Lens.from_maps(maps, model=work.model),
        lambda: matlens.lens.prediction_quality(work.readout, maps, work.activations),
    ]
    for use in refused:
        with pytest.raises(InputError):
            use()
    # What a user's own function applies is her affair.
    by_function = Replacement(lambda h: maps[0, 3](h), Site.parse("h.0"), Site.parse("h.3"))
    said = MapSet([maps[0, 3]], provenance=work.activations.provenance)
    for replacements in ([by_function], matlens.jump(said, 0, 3)):
        with matlens.patched(work.model, replacements):
            pass


# Dropout


PASSES: dict[str, Callable[[Any], Any]] = {
    "collect": lambda w: matlens.collect(w.model, w.examples, progress=False),
    "Lens.identity": lambda w: matlens.Lens.identity(w.model).trajectory("w1 w2"),
    "Lens.trajectory": lambda w: w.lens.trajectory("w1 w2"),
    "Readout": lambda w: Readout(w.model),
    "Trace": lambda w: ffn.Trace.run(w.model, w.examples, progress=False),
    "patched": lambda w: matlens.patched(w.model, matlens.jump(w.maps, 0, 3)).__enter__(),
    "text_losses": lambda w: text_losses(w.model, Corpus("c", ("w1 w2",), 1, 0, 0, 0), progress=False),
    "continue_prompts": lambda w: continue_prompts(w.model, ["w1"], n_tokens=1),
    "Lens.fit": lambda w: matlens.Lens.fit(w.model, w.examples, progress=False),
}


def test_a_model_with_dropout_is_refused(work):
    work.model.train()
    for name, use in PASSES.items():
        with pytest.raises(InputError, match=r"model\.eval\(\)"):
            print(name, use(work))
    work.model.eval()
    for use in PASSES.values():
        use(work)
