"""A model is known by its weights and its tokens, and what belongs to another one is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from matlens import InputError, InputWarning, MapSet, Readout, Site, ffn, linear
from matlens.activations import stream
from matlens.data import Corpus
from matlens.ffn import text_losses
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.weights import fingerprint
from matlens.patching.replacements import Replacement

# What belongs to one model


def test_an_identity_is_read_back_from_its_json(small_model):
    known = ModelIdentity.from_model(small_model("gpt2"))
    written = json.loads(json.dumps(known.to_json()))
    assert list(written)[:2] == ["base_model_name_or_path", "base_model_revision"]
    assert ModelIdentity.from_json(written) == known
    for damaged in ({}, {**written, "color": "red"}, {**written, "n_layers": "b1"}):
        with pytest.raises(InputError, match="The record of a model is damaged"):
            ModelIdentity.from_json(damaged)


WHOLE = Provenance(make_identity(), {"corpus": "words", "n": 3}, "f1", "sampled", {"k": 4, "seed": 2})


@pytest.mark.parametrize("provenance", [WHOLE, WHOLE.samples, Provenance(), Provenance(details={"k": 1})])
def test_a_provenance_is_read_back_from_its_json(provenance):
    assert Provenance.from_json(json.loads(json.dumps(provenance.to_json()))) == provenance


def test_results_of_another_model_or_other_tokens_raise():
    other = make_identity("renamed", "f00d")
    WHOLE.check_same(other, ours="the maps")
    WHOLE.check_same(Provenance(other), ours="the maps", theirs="the trace")
    others = {
        make_identity("b", "beef"): "weights",
        make_identity(configuration="beef"): "configuration",
        make_identity("b", "beef", dtype="bfloat16"): "float32 and bfloat16",
        make_identity("b", "beef", d_model=8): "d_model 5 and 3 layers, d_model 8",
        make_identity(tokens="0001", token_policy="'<s>' in front"): "tokens",
        make_identity(tokens="0001"): "tokens",
        make_identity(tokens=None, token_policy="no tokenizer"): "tokens",
    }
    for identity, difference in others.items():
        assert difference in WHOLE.identity.difference(identity)
        with pytest.raises(InputError):
            WHOLE.check_same(identity, ours="the maps")
    for ours, theirs in ((WHOLE, Provenance()), (Provenance(), WHOLE), (Provenance(), Provenance())):
        with pytest.raises(InputError):
            ours.check_same(theirs, ours="the clusters")


def test_strict_false_accepts_another_model_of_the_same_shape_and_records_it():
    other, wider = make_identity("tuned", "beef"), make_identity("wide", "beef", d_model=8)
    assert WHOLE.on(make_identity("renamed"), ours="the maps") is WHOLE
    with pytest.raises(InputError):
        WHOLE.on(other, ours="the maps")
    with pytest.warns(InputWarning) as warned:
        moved = WHOLE.on(other, ours="the maps", strict=False)
    assert len(warned) == 1
    moved.check_same(other, ours="the maps")
    assert moved.details["transferred_from"] == {
        "model": "some/model",
        "fingerprint": "f00d",
        "differs": "weights",
    }
    assert Provenance.from_json(json.loads(json.dumps(moved.to_json()))) == moved
    with pytest.raises(InputError):
        WHOLE.on(wider, ours="the maps", strict=False)
    assert Provenance().on(other, ours="the maps").model == other


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


EDITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "scaled": lambda w: w.mul_(1.01),
    "low rank": lambda w: w.add_(torch.outer(torch.ones(len(w)), torch.linspace(-1, 1, w.shape[1]))),
    "the odd columns": lambda w: w[:, 1::2].add_(1),
    "rows reversed": lambda w: w.copy_(w.flip(0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(700, 3000), (4096, 1024), (9000, 2)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_fingerprint_sees_scaled_merged_and_permuted_weights(transposed, shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = []
    for edit in (lambda w: None, *EDITS.values(), lambda w: None):
        layer = torch.nn.Linear(*shape[::-1], bias=False)
        edited = weight.clone()
        edit(edited)
        layer.weight.data = edited.T.contiguous().T.to(dtype) if transposed else edited.to(dtype)
        found.append(fingerprint(TransformerBridge(layer)))  # type: ignore[arg-type]
    assert found[0] == found[-1]
    assert len(set(found)) == 1 + len(EDITS)


def test_fingerprint_sees_buffers_that_a_checkpoint_holds():
    module = torch.nn.Linear(3, 2)
    module.register_buffer("kept", torch.ones(4))
    module.register_buffer("made", torch.ones(4), persistent=False)
    first = fingerprint(TransformerBridge(module))  # type: ignore[arg-type]
    module.made[1] = 2
    assert fingerprint(TransformerBridge(module)) == first  # type: ignore[arg-type]
    module.kept[1] = 2
    assert fingerprint(TransformerBridge(module)) != first  # type: ignore[arg-type]


def test_precisions_of_one_model_are_two_models(model_folder):
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    found = [
        ModelIdentity.from_model(matlens.load(str(model_folder("gpt2")), device="cpu", dtype=kind))
        for kind in kinds
    ]
    assert [model.dtype for model in found] == ["float32", "bfloat16", "float16"]
    assert len({model.key for model in found}) == 3


def test_offloaded_weights_are_refused():
    """As accelerate leaves them between two passes: on no device."""
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=8, intermediate_size=8, num_attention_heads=2
    )
    plain = transformers.LlamaForCausalLM(config).eval()
    whole = matlens.wrap(build_bridge_from_module(plain, "LlamaForCausalLM", hf_config=config))
    layer = whole.original_model.model.layers[1].mlp
    layer.to("meta")
    for read in (fingerprint, ModelIdentity.from_model, matlens.wrap):
        with pytest.raises(InputError, match=r"in memory, including model\.layers\.1\.mlp"):
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


@contextmanager
def edited(model: Any) -> Iterator[None]:
    """Scale an FFN's weights in place."""
    weight = model.blocks[1].mlp.out.original_component.weight.data
    before = weight.clone()
    weight.mul_(1.01)
    try:
        yield
    finally:
        weight.copy_(before)


def test_results_of_a_model_do_not_go_with_its_edited_weights(work):
    uses: list[Callable[..., Any]] = [
        lambda **o: work.lens.on(work.model, **o),
        lambda **o: work.maps.on(work.model, **o),
        lambda **o: work.projection.on(work.model, **o),
    ]
    with edited(work.model):
        for use in uses:
            with pytest.raises(InputError):
                use()
            with pytest.warns(InputWarning):
                use(strict=False)
    for use in uses:
        use()


# Whose maps they are


def test_maps_of_no_known_model_are_refused_where_a_model_is_given(work):
    rows = stream(work.model, work.examples, ["h.0", "h.3"], progress=False)
    maps = MapSet(linear.fit_stream((part.vectors for part in rows), [("h.0", "h.3")]))
    refused: list[Callable[[], Any]] = [
        lambda: matlens.Lens.from_maps(maps, model=work.model),
        lambda: matlens.lens.prediction_quality(work.readout, maps, work.activations),
    ]
    for use in refused:
        with pytest.raises(InputError):
            use()
    # What a user's own function applies is her affair.
    by_function = Replacement(lambda h: maps[0, 3](h), Site.parse("h.0"), Site.parse("h.3"))
    said = MapSet([maps[0, 3]], provenance=work.activations.provenance)
    for replacements in ([by_function], matlens.jump(said, 0, 3), matlens.jump(maps, 0, 3)):
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


def test_identity_changes_with_the_configuration(model_folder, tmp_path):
    """The same weights compute something else with another epsilon."""
    shutil.copytree(model_folder("llama"), tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    folders = (model_folder("llama"), tmp_path / "other")
    models = [matlens.load(str(folder), device="cpu") for folder in folders]
    first, second = map(ModelIdentity.from_model, models)
    assert first.fingerprint == second.fingerprint
    assert first.difference(second) == "configuration"


def test_weights_edited_between_two_batches_of_a_stream_are_noticed(work):
    rows = stream(work.model, work.examples, ["h.1"], batch_tokens=1, progress=False)
    next(rows)
    with edited(work.model), pytest.raises(InputError):
        list(rows)
