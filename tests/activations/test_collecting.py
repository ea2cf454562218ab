"""Collected vectors are those of one sentence at a time in the plain model, however they are collected."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from conftest import (
    LAYERS,
    N_LAYERS,
    SITE_MODULES,
    WIRING_OF,
    WIRINGS,
    assert_near,
    load_plain,
    plain_vectors,
)
from patched_models import hook_counts
from safetensors.torch import load_file
from torch import Tensor

import matlens
from matlens import InputError, collect, make_examples
from matlens.activations.collecting import stream
from matlens.data.examples import Batch, Examples
from matlens.models.layout import ModelLayout

STREAM = [f"h.{layer}" for layer in range(N_LAYERS + 1)]


def every_site(name: str) -> list[str]:
    return STREAM + [f"{kind}.{layer}" for kind in SITE_MODULES[name] for layer in range(N_LAYERS)]


@pytest.fixture(scope="module")
def reference(plain_model):
    """Vectors of every site at every token, the sentences run alone and without padding."""
    known: dict[tuple[str, str], dict[str, Tensor]] = {}

    def found(name: str, examples: Examples) -> dict[str, Tensor]:
        key = (name, examples.fingerprint)
        if key not in known:
            parts = np.split(examples.tokens, examples.offsets[1:-1])
            alone = [plain_vectors(name, plain_model(name), torch.from_numpy(part)) for part in parts]
            known[key] = {site: torch.cat([one[site][0] for one in alone]) for site in every_site(name)}
        return known[key]

    return found


def sampled_rows(examples: Examples) -> Tensor:
    return torch.from_numpy(examples.offsets[:-1] + examples.positions)


@pytest.fixture
def llama(small_model, sentences):
    """A model, and sentences of different lengths."""
    model = small_model("llama")
    return model, make_examples(model, sentences)


def batches(examples: Examples, budget: int, positions: str = "sampled") -> list[Batch]:
    """Batches that a decoder is run on: for sampled positions it reads no sentence further than its own."""
    return list((examples if positions == "all" else examples.up_to_positions()).batches(budget))


# The same vectors, however they are collected


@pytest.mark.parametrize("name", WIRINGS)
def test_all_sites_at_all_positions_are_those_of_each_sentence_alone(name, small_model, sentences, reference):
    examples = make_examples(small_model(name), sentences)
    expected = reference(name, examples)
    found = collect(
        small_model(name), examples, every_site(name), positions="all", batch_tokens=100, progress=False
    )
    assert list(found) == every_site(name)
    assert found.n_rows == len(examples.tokens)
    for site in found:
        assert_near(found[site], expected[site])


@pytest.mark.parametrize(("batch_tokens", "padding_side"), [(1, "right"), (64, "left")])
@pytest.mark.parametrize("name", ["gpt2", "neox", "bert"])
def test_sampled_positions_are_the_same_whatever_the_batches_are(
    name, batch_tokens, padding_side, small_model, sentences, reference, monkeypatch
):
    model = small_model(name)
    monkeypatch.setattr(model.tokenizer, "padding_side", padding_side)
    examples = make_examples(model, sentences, seed=1)
    expected = reference(name, examples)
    found = collect(model, examples, batch_tokens=batch_tokens, progress=False)
    assert list(found) == STREAM
    for site in STREAM:
        assert found[site].dtype == torch.float32
        assert_near(found[site], expected[site][sampled_rows(examples)])


def test_half_precision_is_kept_in_float32_as_it_was(model_folder, sentences):
    """A bfloat16 number is a float32 number: nothing is rounded on the way."""
    model = matlens.load(str(model_folder("llama")), device="cpu", dtype=torch.bfloat16)
    examples = make_examples(model, sentences)
    found = collect(model, examples, positions="all", batch_tokens=1, progress=False)
    plain = load_plain("llama", model_folder("llama"), dtype=torch.bfloat16)
    parts = np.split(examples.tokens, examples.offsets[1:-1])[:5]
    alone = [plain_vectors("llama", plain, torch.from_numpy(part)) for part in parts]
    for site in STREAM:
        assert found[site].dtype == torch.float32
        assert torch.equal(found[site], found[site].bfloat16().float())
        expected = torch.cat([one[site][0] for one in alone]).float()
        assert_near(found[site][: examples.offsets[5]], expected, 0.05)


# Streaming


@pytest.mark.parametrize("positions", ["sampled", "all"])
def test_stream_yields_every_row_once_and_the_same_as_collect(positions, llama, runs):
    model, examples = llama
    options: dict[str, Any] = {"positions": positions, "batch_tokens": 80, "progress": False}
    whole = collect(model, examples, **options)
    rows = list(stream(model, examples, STREAM, **options))
    expected = batches(examples, 80, positions)
    assert len(rows) == len(expected) > 4
    if positions == "sampled":
        assert [one.index.tolist() for one in rows] == [batch.index.tolist() for batch in expected]
    index = np.concatenate([one.index for one in rows])
    assert sorted(index.tolist()) == list(range(whole.n_rows))
    for one in rows:
        assert list(one.vectors) == STREAM
        for site, vectors in one.vectors.items():
            assert torch.equal(vectors, whole[site][torch.from_numpy(one.index)])
    runs.clear()
    rest = list(stream(model, examples, STREAM, batch_indices=range(3, len(rows)), **options))
    assert [one.index.tolist() for one in rest] == [one.index.tolist() for one in rows[3:]]
    assert len(runs) == len(rest)


@pytest.fixture
def runs(monkeypatch):
    """The sentences of each batch that the model is run on, and how many tokens of them it reads."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    inputs = Batch.inputs

    def counted(batch: Batch, model: Any) -> Any:
        found.append((batch.index, batch.mask.sum(1).numpy()))
        return inputs(batch, model)

    monkeypatch.setattr(Batch, "inputs", counted)
    return found


# No more work than is needed


def test_the_vectors_of_a_batch_are_freed_with_it(llama):
    """By their references alone: a cycle would hold those of many batches until it is collected."""
    model, examples = llama
    gc.disable()
    try:
        batches = stream(model, examples, STREAM, batch_tokens=64, progress=False)
        first = [weakref.ref(vectors) for vectors in next(batches).vectors.values()]
        next(batches)
        assert [vectors() for vectors in first] == [None] * len(first)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["gpt2", "neox", "bert"])
def test_nothing_runs_past_the_last_wanted_site(name, small_model, sentences):
    model, called = small_model(name), list[str]()
    examples = make_examples(model, sentences)
    ModelLayout.from_model(model)  # looks once at the whole model
    blocks = model.original_model.get_submodule(LAYERS[name][0])
    parts = {f"block {i}": block for i, block in enumerate(blocks)} | {"unembed": model.unembed}
    parts |= {
        f"ffn {i}": block.get_submodule(SITE_MODULES[name]["ffn_out"][0]) for i, block in enumerate(blocks)
    }
    handles = [
        module.register_forward_pre_hook(lambda *_, part=part: called.append(part))
        for part, module in parts.items()
    ]
    n = len(list(examples.batches(80)) if name == "bert" else batches(examples, 80))
    for site, n_blocks, n_ffns in (("h.0", 1, 0), ("attn_out.1", 2, 1), ("ffn_out.1", 2, 2), ("h.3", 3, 3)):
        called.clear()
        collect(model, examples, [site, "h.0"], batch_tokens=80, progress=False)
        found = [sum(part.startswith(kind) for part in called) for kind in ("block", "ffn", "unembed")]
        if WIRING_OF[name] == "parallel" and site == "attn_out.1":  # the order of both is the model's own
            found[1] = n * n_ffns
        assert found == [n * n_blocks, n * n_ffns, 0]
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_decoder_reads_each_sentence_up_to_its_position(name, small_model, sentences, runs):
    examples = make_examples(small_model(name), sentences)
    up_to = examples.lengths if name == "bert" else examples.positions + 1
    for positions, expected in (("sampled", up_to), ("all", examples.lengths)):
        runs.clear()
        collect(small_model(name), examples, [0], positions=positions, progress=False)
        index, n_read = (np.concatenate(part) for part in zip(*runs, strict=True))
        assert n_read[index.argsort()].tolist() == expected.tolist()


# On disk


def test_other_readers_and_jobs_of_fewer_sites_find_the_vectors_of_a_folder(
    small_model, sentences, tmp_path, monkeypatch
):
    model, folder = small_model("bert"), tmp_path / "deep" / "folder"
    examples = make_examples(model, sentences, seed=9)
    options: dict[str, Any] = {"positions": "all", "batch_tokens": 150, "progress": False}
    memory = collect(model, examples, every_site("bert"), **options)
    disk = collect(model, examples, every_site("bert"), folder=folder, **options)
    assert list(disk) == list(memory)
    assert all(torch.equal(disk[site], memory[site]) for site in memory)
    assert (disk.provenance.model, disk.positions) == (memory.provenance.model, "all")
    shards = [load_file(path) for path in sorted(folder.glob("0*.safetensors"))]
    index, rows = (torch.cat([shard[name] for shard in shards]) for name in ("index", "h.2"))
    assert torch.equal(rows[index.argsort()], memory["h.2"])
    monkeypatch.setattr(Batch, "inputs", lambda *args: pytest.fail("the model was run"))
    some = collect(model, examples, [-1, "attn_out.1"], folder=folder, **options)
    assert all(torch.equal(some[site], memory[site]) for site in ("h.3", "attn_out.1"))


BUDGET = 55  # tokens, which makes six batches


def test_hooks_are_gone_after_an_exception_and_a_stream_that_is_not_read_to_its_end(llama):
    model, examples = llama
    model(torch.arange(5, 9)[None], return_type=None)
    before = hook_counts(model)
    handle = model.original_model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        collect(model, examples, progress=False)
    handle.remove()
    assert hook_counts(model) == before
    rows = stream(model, examples, [0], batch_tokens=BUDGET, progress=False)
    next(rows)
    assert hook_counts(model) == before
    rows.close()  # type: ignore[attr-defined]
    assert hook_counts(model) == before
    assert sum(before[: len(model.hook_dict)]) == 0


def test_overflow_in_float16_is_refused_with_its_site_and_leaves_nothing(model_folder, sentences, tmp_path):
    model = matlens.load(str(model_folder("llama")), device="cpu", dtype=torch.float16)
    examples = make_examples(model, sentences)
    ModelLayout.from_model(model)  # known from before, as where only some sentences overflow
    with torch.no_grad():
        for name, parameter in model.original_model.named_parameters():
            if "layers.1" in name and "down" in name:
                parameter.mul_(1e6)
    with pytest.raises(InputError, match=r"vectors at h\.2 are not finite.*bfloat16 or float32"):
        collect(model, examples, folder=tmp_path / "out", progress=False)
    assert list(tmp_path.rglob("*")) == []
    assert bool(collect(model, examples, [0, 1], progress=False)[1].isfinite().all())


def test_no_sites_and_examples_of_another_tokenizer_are_refused(small_model, sentences, llama):
    with pytest.raises(InputError, match=r"^sites must"):
        collect(*llama, [], progress=False)
    examples = make_examples(small_model("bert"), sentences)
    collect(small_model("roberta"), examples.head(3), [0], progress=False)  # reads text as that model does
    with pytest.raises(InputError, match="another tokenizer"):
        collect(small_model("gpt2"), examples, [0], progress=False)


# What was collected


@pytest.mark.parametrize("positions", ["sampled", "all"])
def test_shards_and_the_first_sentences_are_those_of_the_whole(positions, llama, tmp_path):
    options: dict[str, Any] = {"positions": positions, "batch_tokens": BUDGET, "progress": False}
    memory = collect(*llama, [0, 2], **options)
    for found in (memory, collect(*llama, [0, 2], folder=tmp_path / "out", **options)):
        parts = list(found.shards([2]))
        index = torch.from_numpy(np.concatenate([part.index for part in parts]))
        assert torch.equal(torch.cat([part.vectors["h.2"] for part in parts]), memory[2][index])
        assert np.array_equal(np.concatenate([part.places for part in parts]), memory.places[index])
        few = found.head(7)
        n = 7 if positions == "sampled" else int(llama[1].lengths[:7].sum())
        assert few.n_rows == n
        assert torch.equal(few[0], memory[0][:n])
