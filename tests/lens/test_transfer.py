"""A lens or maps of a model are used on its tuned version: one warning, the numbers, and what differs."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_lines import run_command
from conftest import D_MODEL, N_LAYERS, make_sentences

import matlens
from matlens import InputError, InputWarning, Lens, LinearMap, MapSet, Readout
from matlens.explorer import explore
from matlens.lens import compare_lenses, evaluate_lenses, exit_sweep, prediction_quality
from matlens.numerics import kl_divergence

PROMPT = "w3 w14 w15 w9"


@pytest.fixture(scope="module")
def work(model_folder, tmp_path_factory):
    """A model, its tuned version in a folder, and a lens and maps of the first."""
    base, folder = matlens.load(model_folder("llama"), device="cpu"), tmp_path_factory.mktemp("tuned")
    plain = matlens.pruning.plain_copy(base)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if name.endswith("proj.weight"):
                left, right = (torch.randn(n, 2, generator=generator) for n in weight.shape)
                weight += 0.05 * left @ right.T
    plain.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    train, validation = make_sentences().split(n_train=30, n_validation=10, seed=0)
    tuned = matlens.load(folder, device="cpu")
    vectors = matlens.collect(base, matlens.make_examples(base, train), progress=False)
    maps = MapSet.fit(vectors, pairs=[(1, N_LAYERS), (2, N_LAYERS), (1, 2)], ridge=1.0, progress=False)
    there = matlens.collect(tuned, matlens.make_examples(tuned, validation), progress=False)
    return SimpleNamespace(
        base=base, tuned=tuned, folder=folder, maps=maps, lens=Lens.from_maps(maps, model=base), there=there,
        parts=(train, validation), name=str(base.cfg.model_name),
    )  # fmt: skip


def transferred(work: Any) -> Lens:
    with pytest.warns(InputWarning):
        return work.lens.on(work.tuned, strict=False)


def assert_recorded(details: Any, work: Any) -> None:
    assert details["transferred_from"] == {
        "model": work.name, "fingerprint": work.lens.provenance.identity.fingerprint, "differs": "weights"
    }  # fmt: skip


def n_warnings(printed: str) -> int:
    """How often a command warned of another model, however the lines are wrapped."""
    return " ".join(printed.split()).count("although they differ")


USES = {
    "lens": lambda w, path, how: w.lens.on(w.tuned, **how),
    "folder": lambda w, path, how: Lens.load(path / "lens", w.tuned, **how),
    "file": lambda w, path, how: Lens.from_jacobian_lens(path / "lens.pt", w.tuned, **how),
    "maps": lambda w, path, how: w.maps.on(w.tuned, **how),
    "folder of maps": lambda w, path, how: MapSet.load(path / "maps").on(w.tuned, **how),
}


@pytest.mark.parametrize("use", USES)
def test_each_way_onto_a_tuned_model_warns_once_and_records(use, work, tmp_path):
    work.lens.save(tmp_path / "lens")
    work.lens.to_jacobian_lens(tmp_path / "lens.pt")
    work.maps.save(tmp_path / "maps")
    with pytest.raises(InputError):
        USES[use](work, tmp_path, {})
    with pytest.warns(InputWarning) as warned:
        moved = USES[use](work, tmp_path, {"strict": False})
    assert len(warned) == 1
    assert_recorded(moved.provenance.details, work)
    maps = moved.maps if isinstance(moved, Lens) else moved
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # its maps are of the tuned model now
        for linear in maps.values():
            with matlens.patched(work.tuned, [linear]):
                pass
    if isinstance(moved, Lens):
        moved.save(tmp_path / "moved")
        assert_recorded(Lens.load(tmp_path / "moved", work.tuned).provenance.details, work)


def test_two_transfers_record_both_models(work):
    moved = transferred(work)
    with pytest.warns(InputWarning) as warned:
        back = moved.on(work.base, strict=False)
    assert len(warned) == 1
    record = back.provenance.details["transferred_from"]
    assert record["model"] == str(work.tuned.cfg.model_name)
    assert_recorded(record, work)


def test_another_shape_is_refused_in_any_case(work, small_model):
    wide = matlens.LinearMap(torch.eye(2 * D_MODEL), None, "h.1", f"h.{N_LAYERS}")
    with pytest.raises(InputError), matlens.patched(work.tuned, [wide], strict=False):
        pass
    other = Lens.identity(small_model("llama"))
    identity = matlens.models.ModelIdentity.from_model(work.base)
    for change in ({"n_layers": N_LAYERS + 1}, {"d_model": 2 * D_MODEL}):
        odd = matlens.models.Provenance(matlens.models.ModelIdentity(**vars(identity) | change))
        with pytest.raises(InputError):
            odd.on(other.provenance.identity, ours="the lens", strict=False)


def test_a_transferred_lens_is_evaluated_on_the_tuned_model(work):
    lens, readout = transferred(work), Readout(work.tuned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = evaluate_lenses({"mat": lens}, work.there, layers=[1, 2], progress=False)
        exits = exit_sweep({"mat": lens}, work.there, layers=[1, 2], progress=False)
    with pytest.warns(InputWarning):
        moved = work.maps.on(work.tuned, strict=False)
    quality = prediction_quality(readout, moved, work.there, progress=False)
    true = readout.log_probs(work.there[N_LAYERS])
    for layer in (1, 2):
        predicted = readout.log_probs(work.there[layer] @ work.maps[layer, N_LAYERS].weight.T)
        at = table[table["layer"] == layer].set_index(["metric", "k"])["value"]
        right = (true.argmax(-1) == predicted.argmax(-1)).double().mean().item()
        assert at["precision", 1] == pytest.approx(right)
        kl = table.query("layer == @layer and metric == 'kl'")["value"].item()
        assert kl == pytest.approx(kl_divergence(true, predicted).mean().item(), rel=1e-4)
        cells = "layer == @layer and k == 1 and method == 'mat' and metric == 'precision'"
        assert quality.query(cells)["value"].item() == pytest.approx(right)
        fixed = exits[exits["lam"].isna()].set_index("layer")["value"]
        assert fixed[float(layer)] == pytest.approx(right)


def test_results_of_a_transferred_lens_record_what_differs(work, tmp_path):
    lens = transferred(work)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = lens.trajectory(PROMPT)
        assert_recorded(read.provenance.details, work)
        page = explore(work.tuned, PROMPT, [lens], progress=False)
    assert any(work.name in note and "weights" in note for note in page.notes)
    compared = compare_lenses(
        work.tuned, work.parts, tmp_path, methods=["id"], fitted={"moved": (lens, 0.0)}, layers=[1, 2],
        progress=False,
    )  # fmt: skip
    assert compared.origin["transferred_from"].keys() == {"moved"}
    assert_recorded({"transferred_from": compared.origin["transferred_from"]["moved"]}, work)
    assert not lens.trajectory(PROMPT).lens.maps[1].provenance.details.keys() - lens.provenance.details.keys()
    assert "transferred_from" not in work.lens.trajectory(PROMPT).provenance.details
    assert not any(
        work.name in note for note in explore(work.base, PROMPT, [work.lens], progress=False).notes
    )


def test_patched_takes_maps_of_the_base_model_with_one_warning(work):
    maps = [work.maps[1, 2], LinearMap(work.maps[2, N_LAYERS].weight, None, "h.2", f"h.{N_LAYERS}")]
    known = [maps[0], work.maps[2, N_LAYERS]]
    with pytest.raises(InputError), matlens.patched(work.tuned, known):
        pass
    for given in (maps, known):
        with pytest.warns(InputWarning) as warned, matlens.patched(work.tuned, given, strict=False):
            patched = matlens.collect(work.tuned, work.there.examples, [N_LAYERS], progress=False)
        assert len(warned) == 1
        assert any(work.name in hook for hook in patched.provenance.active_hooks)
        expected = work.there[1] @ work.maps[1, 2].weight.T @ work.maps[2, N_LAYERS].weight.T
        torch.testing.assert_close(patched[N_LAYERS], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("always::matlens.InputWarning")
def test_commands_take_a_lens_of_the_base_model(work, tmp_path, capsys):
    work.lens.save(tmp_path / "lens")
    work.lens.to_jacobian_lens(tmp_path / "lens.pt")
    options: list[Any] = ["--model", work.folder, "--device", "cpu"]
    page = tmp_path / "page.html"
    commands: list[list[Any]] = [
        ["lens", "show", PROMPT, "--lens", tmp_path / "lens"],
        ["lens", "trajectory", PROMPT, "--lens", tmp_path / "lens"],
        ["lens", "convert", tmp_path / "lens", tmp_path / "copy"],
        ["lens", "convert", tmp_path / "lens.pt", tmp_path / "copy of file"],
        ["explore", PROMPT, "--lens", tmp_path / "lens", "--out", page],
    ]
    for command in commands:
        assert run_command([*command, *options], capsys).code == 2
        done = run_command([*command, *options, "--no-strict"], capsys)
        assert (done.code, n_warnings(done.err)) == (0, 1)
    assert_recorded(Lens.load(tmp_path / "copy", work.tuned).provenance.details, work)
    assert work.name in page.read_text()
    shown = run_command([*commands[0], *options, "--no-strict"], capsys).out
    lens = transferred(work)
    assert all(tokens[-1][0] in shown for tokens in lens.trajectory(PROMPT, k=1).top_tokens().values())


@pytest.mark.filterwarnings("always::matlens.InputWarning")
def test_maps_in_a_folder_are_evaluated_on_the_tuned_model(work, tmp_path, capsys):
    out, corpus = tmp_path / "out", tmp_path / "words.txt"
    corpus.write_text("\n".join(make_sentences().sentences))
    sizes: list[Any] = ["--train", 30, "--val", 10, "--ridge", 1, "--pairs", "last"]
    run = ["run", "--corpus", corpus, "--model", work.name, "--device", "cpu", "--out", out, *sizes]
    assert run_command(run, capsys).code == 0
    evaluate = ["evaluate", out, "--model", work.folder, "--device", "cpu"]
    assert run_command(evaluate, capsys).code == 2
    done = run_command([*evaluate, "--no-strict"], capsys)
    assert (done.code, n_warnings(done.err)) == (0, 1)
    results = json.loads(Path(out, "results.json").read_text())
    assert_recorded(results["maps"], work)
    shutil.rmtree(out)
