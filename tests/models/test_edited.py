"""A model whose weights are edited is another model for all that was made before, and dropout is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import D_MODEL, make_sentences
from control import continue_prompts

import matlens
from matlens import InputError, LinearMap, MapSet, Readout, Site, ffn, linear
from matlens.activations import stream
from matlens.data import Corpus
from matlens.ffn import text_losses
from matlens.patching.replacements import Replacement

H = torch.randn(3, D_MODEL, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def work(model_folder: Callable[[str], Path]) -> SimpleNamespace:
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
    "Readout.log_probs": lambda w: w.readout.log_probs(H),
    "Readout.top_ids": lambda w: w.readout.top_ids(H),
    "Readout.top_ids_and_ranks": lambda w: w.readout.top_ids_and_ranks(H, torch.tensor([1, 2, 3])),
    "Readout.features": lambda w: w.readout.features(H),
    "Readout.token_scores": lambda w: w.readout.token_scores(H),
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


EDITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "scaled": lambda weight: weight.mul_(1.25),
    "one number": lambda weight: weight.view(-1)[7:8].add_(1e-3),
    "permuted": lambda weight: weight.copy_(weight.flip(0).clone()),
}


def edit(model: Any, part: str, kind: str = "scaled") -> None:
    """Edit the head's or an FFN's weights in place."""
    module = model.unembed if part == "head" else model.blocks[1].mlp.out
    EDITS[kind](module.original_component.weight.data)


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize(("part", "name"), [("head", n) for n in HEAD] + [("ffn", n) for n in FFN])
def test_what_was_made_before_an_edit_is_refused_after_it(
    part: str, name: str, kind: str, work: SimpleNamespace
) -> None:
    use = (HEAD if part == "head" else FFN)[name]
    use(work)
    edit(work.model, part, kind)
    with pytest.raises(InputError):
        use(work)


def test_value_vectors_of_other_layers_are_still_those_of_the_model(work: SimpleNamespace) -> None:
    before = work.values.layer(0)
    edit(work.model, "ffn")
    assert torch.equal(work.values.layer(0), before)


def test_weights_edited_between_two_batches_of_a_stream_are_noticed(work: SimpleNamespace) -> None:
    rows = stream(work.model, work.examples, ["h.1"], batch_tokens=1, progress=False)
    next(rows)
    edit(work.model, "ffn")
    with pytest.raises(InputError):
        list(rows)


def test_weights_edited_within_a_loop_that_checks_once_are_noticed_at_its_end(work: SimpleNamespace) -> None:
    def read_twice() -> None:
        with work.readout.weights.constant():
            work.readout.logits(H)
            edit(work.model, "head")
            work.readout.logits(H)

    with pytest.raises(InputError):
        read_twice()


# Whose maps they are


def test_maps_of_streamed_vectors_are_of_the_model(
    work: SimpleNamespace, small_model: Callable[[str], Any]
) -> None:
    rows = stream(work.model, work.examples, ["h.0", "h.2"], progress=False)
    maps = MapSet(linear.fit_stream(rows, [("h.0", "h.2")]))
    assert maps.provenance.identity == work.activations.provenance.identity
    assert maps.n_samples == work.examples.n_positions
    with matlens.patched(work.model, matlens.jump(maps, 0, 2)):
        pass
    with pytest.raises(InputError), matlens.patched(small_model("llama"), matlens.jump(maps, 0, 2)):
        pass


def test_maps_of_no_known_model_are_refused_where_a_model_is_given(work: SimpleNamespace) -> None:
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


def test_the_digest_of_a_map_is_that_of_its_numbers(work: SimpleNamespace) -> None:
    linear_map = work.maps[0, 3]
    before = linear_map.digest
    linear_map.weight.data.mul_(2)
    assert linear_map.digest != before
    same = LinearMap(linear_map.weight.clone(), None, "h.0", "h.3")
    assert linear_map.digest == same.digest
    linear_map.weight.data.mul_(0.5)
    assert linear_map.digest == before


# Dropout


PASSES: dict[str, Callable[[Any], Any]] = {
    "collect": lambda w: matlens.collect(w.model, w.examples, progress=False),
    "stream": lambda w: next(stream(w.model, w.examples, ["h.1"], progress=False)),
    "Lens.identity": lambda w: matlens.Lens.identity(w.model).trajectory("w1 w2"),
    "Lens.trajectory": lambda w: w.lens.trajectory("w1 w2"),
    "Readout": lambda w: Readout(w.model),
    "Trace": lambda w: ffn.Trace.run(w.model, w.examples, progress=False),
    "patched": lambda w: matlens.patched(w.model, matlens.jump(w.maps, 0, 3)).__enter__(),
    "text_losses": lambda w: text_losses(w.model, Corpus("c", ("w1 w2",), 1, 0, 0, 0), progress=False),
    "continue_prompts": lambda w: continue_prompts(w.model, ["w1"], n_tokens=1),
    "Lens.fit": lambda w: matlens.Lens.fit(w.model, w.examples, progress=False),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_model_with_dropout_is_refused(name: str, work: SimpleNamespace) -> None:
    work.model.train()
    with pytest.raises(InputError, match=r"model\.eval\(\)"):
        PASSES[name](work)
    work.model.eval()
    PASSES[name](work)
