"""A model is known by its weights and its tokens, and what belongs to another one is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import D_MODEL, make_sentences
from control.generation import continue_prompts
from identities import make_identity
from transformer_lens.model_bridge.sources import build_bridge_from_module

import matlens
from matlens import InputError, MapSet, Readout, Site, ffn, linear
from matlens.activations import stream
from matlens.data import Corpus
from matlens.ffn import text_losses
from matlens.models import weights
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.weights import fingerprint, rounded_fingerprints
from matlens.patching.replacements import Replacement

# What belongs to one model


def test_an_identity_is_read_back_from_its_json(small_model):
    known = ModelIdentity.from_model(small_model("gpt2"))
    written = json.loads(json.dumps(known.to_json()))
    assert list(written)[:2] == ["base_model_name_or_path", "base_model_revision"]
    assert ModelIdentity.from_json(written) == known
    for damaged in ({}, {**written, "color": "red"}, {**written, "rounded": "b1"}):
        with pytest.raises(InputError, match="The record of a model is damaged"):
            ModelIdentity.from_json(damaged)


WHOLE = Provenance(make_identity(), {"corpus": "words", "n": 3}, "f1", "sampled", {"k": 4, "seed": 2})


@pytest.mark.parametrize("provenance", [WHOLE, WHOLE.samples, Provenance(), Provenance(details={"k": 1})])
def test_a_provenance_is_read_back_from_its_json(provenance):
    assert Provenance.from_json(json.loads(json.dumps(provenance.to_json()))) == provenance


def test_one_guard_refuses_what_belongs_to_another_model_or_other_tokens():
    other = make_identity("renamed", "f00d")
    WHOLE.check_same(other, ours="the maps")
    WHOLE.check_same(Provenance(other), ours="the maps", theirs="the trace")
    refused = {
        make_identity("b", "beef"): "weights or precision differ",
        make_identity(tokens="0001", token_policy="'<s>' in front"): "in the first, '<s>' in front",
        make_identity(tokens="0001"): "their vocabularies or special tokens differ",
        make_identity(tokens=None, token_policy="no tokenizer"): "no tokenizer in the second",
    }
    for identity, reason in refused.items():
        with pytest.raises(InputError, match=f"The maps and this model do not belong together.*{reason}"):
            WHOLE.check_same(identity, ours="the maps")
    for ours, theirs in ((WHOLE, Provenance()), (Provenance(), WHOLE), (Provenance(), Provenance())):
        with pytest.raises(InputError, match=r"not known.*: both must be known"):
            ours.check_same(theirs, ours="the clusters")


def test_one_guard_takes_another_precision_only_where_it_is_told_so():
    wide = make_identity(fingerprint="aa", rounded={"bfloat16": "b1", "float16": "h1"})
    narrow = make_identity(fingerprint="bb", rounded={"bfloat16": "b1"}, dtype="bfloat16")
    other = make_identity(fingerprint="cc", rounded={"bfloat16": "b2"}, dtype="bfloat16")
    strict, lenient = Provenance(wide), Provenance(wide, same_precision=False)
    with pytest.raises(
        InputError, match=r"same but for their precision, float32 .*bfloat16 .*same_precision"
    ):
        strict.check_same(narrow, ours="the maps")
    lenient.check_same(narrow, ours="the maps")
    Provenance(narrow).check_same(lenient, ours="the activations")
    assert lenient == strict
    assert "same_precision" not in lenient.to_json()
    with pytest.raises(InputError, match="weights or precision differ"):
        lenient.check_same(other, ours="the maps")
    with pytest.raises(InputError, match="becomes other tokens"):
        lenient.check_same(replace(narrow, tokens="0001", token_policy="'<s>' in front"), ours="the maps")


class TransformerBridge(torch.nn.Module):
    """What a fingerprint is taken of: a module with a configuration."""

    def __init__(self, module: torch.nn.Module, **config: Any) -> None:
        super().__init__()
        self.original_model: Any = module
        self.original_model.config = transformers.PretrainedConfig(**config)


def _changed(model: Any, name: str) -> str:
    parameter = dict(model.original_model.named_parameters())[name]
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.mul_(1.001).add_(1e-4)
        found = fingerprint(model)
        parameter.copy_(kept)
    return found


def test_fingerprint_changes_with_every_parameter(small_model):
    model = small_model("gpt2")
    names = [name for name, _ in model.original_model.named_parameters()]
    found = [fingerprint(model)] + [_changed(model, name) for name in names]
    assert len(set(found)) == 1 + len(names)
    assert fingerprint(model) == found[0]
    assert all(len(one) == 16 and int(one, 16) >= 0 for one in found)


def _edited(weight: torch.Tensor, dtype: torch.dtype, edit: Callable[[torch.Tensor], Any]) -> tuple[str, str]:
    layer = torch.nn.Linear(3000, 700, bias=False)
    layer.weight.data = weight.to(dtype, copy=True)
    first = fingerprint(TransformerBridge(layer))  # type: ignore[arg-type]
    edit(layer.weight.data)
    return first, fingerprint(TransformerBridge(layer))  # type: ignore[arg-type]


EDITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one number": lambda w: w[311, 1234].add_(0.25),
    "the end of a run": lambda w: w.view(-1)[2**20 - 1].add_(0.25),
    "the last number": lambda w: w[699, 2999].add_(0.25),
    "the last bit": lambda w: w.view(torch.int16)[311, 1235].bitwise_xor_(1),
    "two signs far apart": lambda w: (w[5, 101].neg_(), w[699, 2999].neg_()),
    "columns swapped": lambda w: w[3].copy_(w[3].roll(2)),
    "rows turned around": lambda w: w.copy_(w.flip(0)),
    "up here and down there": lambda w: (w[3, 4].add_(0.5), w[3, 6].sub_(0.5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fingerprint_sees_any_edit(dtype):
    """Edits that keep sums, sets of values or sampled places as they were, through ``.data`` too."""
    weight = torch.randn(700, 3000, generator=torch.Generator().manual_seed(0))
    found = {_edited(weight, dtype, lambda w: None)} | {
        _edited(weight, dtype, edit) for edit in EDITS.values()
    }
    (before,) = {before for before, _ in found}
    assert len({after for _, after in found}) == 1 + len(EDITS)
    assert (before, before) in found


def test_fingerprint_sees_buffers_that_a_checkpoint_holds():
    module = torch.nn.Linear(3, 2)
    module.register_buffer("kept", torch.ones(4))
    module.register_buffer("made", torch.ones(4), persistent=False)
    first = fingerprint(TransformerBridge(module))  # type: ignore[arg-type]
    module.made[1] = 2
    assert fingerprint(TransformerBridge(module)) == first  # type: ignore[arg-type]
    module.kept[1] = 2
    assert fingerprint(TransformerBridge(module)) != first  # type: ignore[arg-type]


def test_half_precisions_are_known_to_be_of_the_same_weights(model_folder, tmp_path):
    folder = model_folder("gpt2")
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    wide, brain, half = (
        ModelIdentity.from_model(matlens.load(str(folder), device="cpu", dtype=kind)) for kind in kinds
    )
    assert [model.dtype for model in (wide, brain, half)] == ["float32", "bfloat16", "float16"]
    assert wide.same_but_rounded(brain)
    assert half.same_but_rounded(wide)
    assert not brain.same_but_rounded(half)
    assert not wide.same_but_rounded(wide)

    other = matlens.load(str(folder), device="cpu", dtype=torch.bfloat16)
    weight = next(other.original_model.parameters())
    weight.data.view(torch.int16)[-1, -1] ^= 1
    assert not wide.same_but_rounded(ModelIdentity.from_model(other))
    # What rounding takes away is not seen in the rounded weights, and seen in those themselves.
    fine = matlens.load(str(folder), device="cpu")
    before = fingerprint(fine), rounded_fingerprints(fine)
    next(fine.original_model.parameters()).data.view(torch.int32)[-1, -1] ^= 1
    assert (fingerprint(fine) != before[0], rounded_fingerprints(fine)) == (True, before[1])


def test_offloaded_weights_are_refused():
    """As accelerate leaves them between two passes: on no device."""
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=8, intermediate_size=8, num_attention_heads=2
    )
    plain = transformers.LlamaForCausalLM(config).eval()
    whole = matlens.wrap(build_bridge_from_module(plain, "LlamaForCausalLM", hf_config=config))
    layer = whole.original_model.model.layers[1].mlp
    layer.to("meta")
    for read in (fingerprint, ModelIdentity.from_model, weights.check_finite_weights, matlens.wrap):
        with pytest.raises(
            InputError, match=r"not in memory, including model\.layers\.1\.mlp.* offloaded to the disk"
        ):
            read(whole)


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
    "Lens.trajectory": lambda w: w.lens.trajectory("w1 w2"),
    "prediction_quality": lambda w: matlens.lens.prediction_quality(w.readout, w.maps, w.activations),
    "Projection.scores": lambda w: w.projection.scores(H),
    "values_promoting": lambda w: w.projection.promoting(w.values, ["w3"], progress=False),
}
FFN: dict[str, Callable[[Any], Any]] = {
    "ValueVectors.layer": lambda w: w.values.layer(1),
    "ValueVectors.vectors": lambda w: w.values.vectors(["L1D3"]),
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


def test_fingerprint_changes_with_the_configuration(model_folder, tmp_path):
    """The same weights compute something else with another epsilon."""
    shutil.copytree(model_folder("llama"), tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    folders = (model_folder("llama"), tmp_path / "other")
    first, second = (fingerprint(matlens.load(str(folder), device="cpu")) for folder in folders)
    assert first != second


def test_weights_edited_between_two_batches_of_a_stream_are_noticed(work):
    rows = stream(work.model, work.examples, ["h.1"], batch_tokens=1, progress=False)
    next(rows)
    with edited(work.model, "ffn"), pytest.raises(InputError):
        list(rows)
