"""What is read without a model is what the model gives, bit by bit; what changed is noticed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import D_MODEL, load_plain
from safetensors.torch import load_file, save_file

import matlens
from matlens import ffn as room
from matlens.errors import InputError
from matlens.ffn import catalogue as module
from matlens.ffn.catalogue import Catalogue, Reading
from matlens.ffn.projection import Projection, token_table, top_tokens_of_all
from matlens.ffn.values import ValueVectors
from matlens.io.entries import default_cache
from matlens.models.identity import ModelIdentity

MADE: dict[Reading, Callable[[Any], Projection]] = {
    "plain": Projection.from_model, "norm": Projection.after_norm, "head": Projection.through_head,
}  # fmt: skip


@pytest.fixture
def folder(
    request: pytest.FixtureRequest,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A folder of a model, and a cache, of this test alone."""
    monkeypatch.setenv("MATLENS_CACHE", str(tmp_path / "cache"))
    name = getattr(request, "param", "llama")
    return Path(shutil.copytree(model_folder(name), tmp_path / "model"))


@pytest.fixture
def known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Catalogue]:
    """A catalogue of a model that has been asked for once, and must not be loaded any more."""
    _ = Catalogue(folder, device="cpu").values

    def refuse(*_: Any, **__: Any) -> Any:
        pytest.fail("the model is loaded")

    monkeypatch.setattr(module, "load", refuse)
    return lambda: Catalogue(folder, device="cpu")


@pytest.mark.parametrize(
    "folder", ["gpt2", "llama", "gptj", "neox", "bert", "gemma2", "gemma3", "granite", "olmo2"], indirect=True
)
def test_what_is_read_is_what_the_model_gives(folder: Path, known: Callable[[], Catalogue]) -> None:
    model, ours = matlens.load(folder, device="cpu"), known()
    values = ValueVectors(model)
    assert (ours.values.n_layers, ours.values.d_mlp, ours.values.d_model) == (
        values.n_layers, values.d_mlp, values.d_model,
    )  # fmt: skip
    assert ours.values.identity == ModelIdentity.from_model(model).of_weights
    assert ours.values.output_kind == values.output_kind
    for layer in range(values.n_layers):
        assert torch.equal(ours.values.matrix(layer), values.matrix(layer))
        assert torch.equal(ours.values.layer(layer), values.layer(layer))
        assert torch.equal(ours.values.bias(layer), values.bias(layer))
        outputs = torch.randn(3, values.d_model, generator=torch.Generator().manual_seed(0))
        assert torch.equal(ours.values.scale(layer, outputs), values.scale(layer, outputs))
    for reading, make in MADE.items():
        projection, expected = ours.projection(reading), make(model)
        assert projection.identity == expected.identity
        assert torch.equal(projection.unembedding, expected.unembedding)
        table = token_table(ours.values, projection, ["L1D7", "L-1D0"], k=4)
        assert table.equals(token_table(values, expected, ["L1D7", "L-1D0"], k=4))


def test_top_tokens_are_worked_out_once(
    folder: Path, known: Callable[[], Catalogue], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = matlens.load(folder, device="cpu")
    for reading, k in (("plain", 5), ("head", 5), ("plain", 3)):
        expected = top_tokens_of_all(ValueVectors(model), MADE[reading](model), k=k, progress=False)
        for attempt in range(2):
            with monkeypatch.context() as patch:
                if attempt:
                    patch.setattr(
                        module, "top_tokens_of_all", lambda *_, **__: pytest.fail("worked out again")
                    )
                ours = known()
                top = ours.top_tokens(
                    ours.values, ours.projection(reading), reading=reading, k=k, progress=False
                )
            assert torch.equal(top.ids, expected.ids)
            assert torch.equal(top.scores, expected.scores)


def test_a_model_in_memory_is_read_itself(folder: Path) -> None:
    Catalogue(folder, device="cpu").projection()
    model = matlens.load(folder, device="cpu")
    with torch.no_grad():
        model.blocks[1].mlp.out.original_component.weight.add_(1)
        model.unembed.original_component.weight.mul_(2)
    ours = Catalogue(model)
    assert torch.equal(ours.values.layer(1), ValueVectors(model).layer(1))
    top = ours.top_tokens(ours.values, ours.projection(), k=3, progress=False)
    expected = top_tokens_of_all(ValueVectors(model), Projection.from_model(model), k=3, progress=False)
    assert torch.equal(top.scores, expected.scores)
    assert not any(entry.kind == "tops" for entry in _entries())


def test_other_precisions_are_kept_apart(folder: Path) -> None:
    for _ in range(2):
        for dtype in (torch.float32, torch.bfloat16):
            ours = Catalogue(folder, device="cpu", dtype=dtype)
            model = matlens.load(folder, device="cpu", dtype=dtype)
            assert ours.values.identity == ModelIdentity.from_model(model).of_weights
            assert torch.equal(ours.values.layer(0), ValueVectors(model).layer(0))
            assert torch.equal(ours.projection("norm").unembedding, Projection.from_model(model).unembedding)


def _entries() -> list[Any]:
    cache = default_cache()
    assert cache is not None
    return cache.entries()


def change_weights(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = tensors[name] + 1
    path.unlink()  # models that are loaded still read the old file
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_changed_file_is_another_model(folder: Path) -> None:
    before = Catalogue(folder, device="cpu").values
    change_weights(folder, "model.layers.1.mlp.down_proj.weight")
    after = Catalogue(folder, device="cpu").values
    assert before.identity.fingerprint != after.identity.fingerprint
    assert torch.equal(after.layer(1), before.layer(1) + 1)


def test_a_damaged_entry_is_not_believed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _ = Catalogue(folder, device="cpu").values
    (entry,) = _entries()
    parts = entry.folder / "parts.safetensors"
    parts.write_bytes(parts.read_bytes()[:-1] + b"?")
    loads: list[Any] = []
    monkeypatch.setattr(
        module, "load", lambda name, **options: loads.append(name) or matlens.load(name, **options)
    )
    model = matlens.load(folder, device="cpu")
    assert torch.equal(Catalogue(folder, device="cpu").values.layer(0), ValueVectors(model).layer(0))
    assert "recomputed" in capsys.readouterr().err
    assert loads == [folder]
    _ = Catalogue(folder, device="cpu").values
    assert loads == [folder]


@pytest.mark.parametrize("folder", ["olmoe"], indirect=True)
def test_a_mixture_is_read_from_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = ValueVectors(matlens.load(folder, device="cpu"))
    for _ in range(2):
        assert torch.equal(Catalogue(folder, device="cpu").values.layer(1), expected.layer(1))
    assert _entries() == []
    assert "recomputed" not in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["t5"], indirect=True)
def test_both_stacks_of_an_encoder_decoder_are_kept_apart(folder: Path) -> None:
    for _ in range(2):
        for stack in ("encoder", "decoder"):
            model = matlens.load(folder, device="cpu", stack=stack)
            ours = Catalogue(folder, device="cpu", stack=stack).values
            assert ours.identity == ModelIdentity.from_model(model).of_weights
            assert torch.equal(ours.layer(0), ValueVectors(model).layer(0))


@pytest.mark.parametrize("folder", ["opt-narrow"], indirect=True)
def test_an_unembedding_of_two_matrices_is_their_product(folder: Path) -> None:
    plain = load_plain("opt-narrow", folder)
    expected = plain.lm_head.weight.detach() @ plain.model.decoder.project_out.weight.detach()
    assert expected.shape == (60, D_MODEL)
    for _ in range(2):
        catalogue = Catalogue(folder, device="cpu")
        torch.testing.assert_close(catalogue.projection("plain").unembedding, expected)
        table = token_table(catalogue.values, catalogue.projection("plain"), ["L1D3"], k=2)
        value = plain.model.decoder.layers[1].fc2.weight.detach()[:, 3]
        assert table["token_id"][0] == int((expected @ value).argmax())
    with pytest.raises(InputError, match="has no final norm"):
        catalogue.projection("norm")


def test_a_switched_off_cache_reads_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MATLENS_CACHE", "off")
    ours, model = Catalogue(folder, device="cpu"), matlens.load(folder, device="cpu")
    assert torch.equal(ours.values.layer(0), ValueVectors(model).layer(0))
    assert not (tmp_path / "cache").exists()


def test_bad_input_is_refused_in_words(folder: Path, known: Callable[[], Catalogue], tmp_path: Path) -> None:
    ours = known()
    with pytest.raises(InputError, match=r"^reading must be"):
        ours.projection("loud")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^k must be"):
        ours.top_tokens(ours.values, ours.projection(), k=61)
    with pytest.raises(InputError, match="There is no model"):
        Catalogue(tmp_path / "absent")
    with pytest.raises(InputError, match=r"^dtype must be"):
        Catalogue(folder, dtype="float32")  # type: ignore[arg-type]
    assert room.Catalogue is Catalogue
