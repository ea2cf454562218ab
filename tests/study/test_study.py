"""What analyses of one model and corpus share is collected and fitted once, and never mixed up."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import D_MODEL, N_LAYERS, assert_near
from studies import Study
from studies.study import head_outputs
from torch import Tensor
from trees import tree

import matlens
from matlens import InputError, MapSet, collect, load_corpus, make_examples
from matlens.activations import collecting
from matlens.activations.activations import Activations
from matlens.data.corpus import Corpus
from matlens.ffn.clusters import Clusters
from matlens.ffn.trace import Trace
from matlens.patching.submodules import fit_submodules, submodule_pairs

N_TRAIN, N_VALIDATION = 26, 12
STREAM = [f"h.{layer}" for layer in range(N_LAYERS + 1)]
PAIRS = [
    (f"{name}_in.{layer}", f"{name}_out.{layer}")
    for layer in range(N_LAYERS)
    for name in ("attn", "ffn", "ln1", "ln2")
]
ENDS = {site for pair in PAIRS for site in pair}


@pytest.fixture
def corpus(sentences: Corpus, tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("\n".join(sentences.sentences))
    return path


@pytest.fixture
def study(small_model: Callable[[str], Any], corpus: Path, tmp_path: Path) -> Callable[..., Study]:
    """A study as a script begins it: nothing is known but the folder."""

    def begin(model: str = "gpt2", **options: Any) -> Study:
        given = {"n_train": N_TRAIN, "n_validation": N_VALIDATION} | options
        name = str(given.pop("corpus", corpus))
        return Study(
            load_model=lambda: small_model(model), load_corpus=lambda: load_corpus(name),
            out=tmp_path / "out", **given,
        )  # fmt: skip

    return begin


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of sentences of every run of the model that collects."""
    seen: list[int] = []
    run = collecting._run

    def counting(model: Any, batch: Any, *rest: Any) -> Any:
        seen.append(len(batch.index))
        return run(model, batch, *rest)

    monkeypatch.setattr(collecting, "_run", counting)
    return seen


def folders(study: Study) -> set[str]:
    return {path.name for path in study.folder.iterdir()}


def assert_same(ours: MapSet, theirs: MapSet) -> None:
    assert list(ours) == list(theirs)
    for pair, linear in ours.items():
        assert torch.equal(linear.weight, theirs[pair].weight)
        assert linear.bias is theirs[pair].bias is None


def test_two_analyses_of_one_folder_collect_and_fit_once(
    study: Callable[..., Study], runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = study()
    maps, validation = first.maps, first.validation
    assert sum(runs) == N_TRAIN + N_VALIDATION
    assert re.fullmatch(r"gpt2-\w{8}--words\.txt-\w{8}", first.folder.name)
    assert folders(first) == {"train", "validation", "maps"}

    def fits(*_: object, **__: object) -> None:
        raise AssertionError("the maps are fitted again")

    monkeypatch.setattr("matlens.study.steps.fit_samples", fits)
    second = study()
    assert_same(second.maps, maps)
    assert torch.equal(second.validation[1], validation[1])
    assert second.origin == first.origin
    assert sum(runs) == N_TRAIN + N_VALIDATION


def test_a_study_is_the_stream_of_both_parts_and_least_squares_between_its_layers(
    study: Callable[..., Study], small_model: Callable[[str], Any]
) -> None:
    fitted, model = study(), small_model("gpt2")
    parts = fitted.corpus.split(n_train=N_TRAIN, n_validation=N_VALIDATION)
    for ours, part in zip(fitted.stream, parts, strict=True):
        alone = collect(model, make_examples(model, part), progress=False)
        assert set(ours) == set(alone) == set(STREAM)
        assert ours.examples.fingerprint == alone.examples.fingerprint
        for layer in range(N_LAYERS + 1):
            assert_near(ours[layer], alone[layer])
    assert fitted.n_layers == N_LAYERS
    assert set(fitted.maps) == {(a, b) for a in STREAM for b in STREAM if a < b}
    x, y = (fitted.stream[0][layer].double().numpy() for layer in (1, N_LAYERS))
    expected = torch.from_numpy(np.linalg.lstsq(x, y, rcond=None)[0].T)
    assert_near(fitted.maps[1, N_LAYERS].weight, expected, 1e-4)
    assert fitted.origin["maps"] == fitted.maps.provenance.to_json()
    assert fitted.origin["validation"]["n"] == N_VALIDATION
    h = fitted.validation[N_LAYERS]
    assert_near(fitted.readout.logits(h), model.unembed(model.ln_final(h)).detach())


def test_submodules_after_the_stream_have_a_folder_of_their_own(
    study: Callable[..., Study], runs: list[int]
) -> None:
    first = study()
    _ = first.stream
    before = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    runs.clear()
    samples = study().submodule_samples
    assert sum(runs) == N_TRAIN
    assert set(samples) == ENDS
    assert folders(first) == {"train", "validation", "train-submodules"}
    assert all(path.read_bytes() == content for path, content in before.items())
    runs.clear()
    assert set(study().submodule_samples) == ENDS
    assert runs == []


def test_submodules_before_the_stream_are_collected_in_one_pass_with_it(
    study: Callable[..., Study], runs: list[int]
) -> None:
    first = study()
    samples = first.submodule_samples
    assert sum(runs) == N_TRAIN
    heads = set(head_outputs(matlens.models.ModelLayout.from_model(first.model)))
    assert len(heads) == N_LAYERS
    assert set(samples) == ENDS | set(STREAM) | heads
    _ = first.stream, first.maps
    assert sum(runs) == N_TRAIN + N_VALIDATION
    assert folders(first) == {"train", "validation", "maps"}
    again = study()
    _ = again.submodule_samples, again.maps
    assert sum(runs) == N_TRAIN + N_VALIDATION
    train, validation = again.head_samples  # of the training sentences all is there
    assert sum(runs) == N_TRAIN + 2 * N_VALIDATION
    assert heads < set(train)
    assert heads < set(validation)
    kept = {site: train[site].clone() for site in heads}
    shutil.rmtree(first.folder / "train")
    alone = study().head_samples[0]
    assert all(torch.equal(alone[site], vectors) for site, vectors in kept.items())


def test_in_which_order_they_are_asked_for_changes_nothing(
    study: Callable[..., Study], tmp_path: Path
) -> None:
    before = study()
    samples, maps, stand_ins = before.submodule_samples, before.maps, before.submodule_maps("all")["all"]
    vectors = {site: samples[site].clone() for site in ENDS}
    kept = {pair: linear.weight.clone() for pair, linear in [*maps.items(), *stand_ins.items()]}
    shutil.rmtree(tmp_path / "out")
    after = study()
    maps, stand_ins, samples = after.maps, after.submodule_maps("all")["all"], after.submodule_samples
    assert all(torch.equal(samples[site], vectors[site]) for site in ENDS)
    again = dict([*maps.items(), *stand_ins.items()])
    assert set(again) == set(kept)
    assert all(torch.equal(linear.weight, kept[pair]) for pair, linear in again.items())


def upper_half(data: Activations) -> Tensor:
    return data[1][:, 0] > data[1][:, 0].median()


@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_stand_ins_are_fitted_on_the_samples_that_are_asked_for(
    model: str, study: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small models have no sinks, so half of the samples are taken for some.
    monkeypatch.setattr("studies.study.sink_rows", upper_half)
    tested = study(model)
    samples, pairs = (
        tested.submodule_samples,
        submodule_pairs(matlens.models.ModelLayout.from_model(tested.model)),
    )
    rows = {
        "all": torch.ones(N_TRAIN, dtype=torch.bool),
        "not-first": torch.from_numpy(samples.examples.positions > 0),
        "not-sink": ~upper_half(tested.stream[0]),
    }
    assert 0 < rows["not-sink"].sum() < N_TRAIN
    assert rows["not-first"].sum() not in (0, N_TRAIN, rows["not-sink"].sum())
    sets: dict[Any, MapSet] = tested.submodule_maps(*rows)
    for fitted, maps in sets.items():
        assert_same(maps, MapSet(fit_submodules(samples, pairs, rows=rows[fitted], progress=False)))
        assert (tested.folder / f"submodule-maps-{fitted}" / "config.json").is_file()
        assert maps.provenance.details["fitted"] == fitted
        assert maps.n_samples == int(rows[fitted].sum())
        x, y = (samples[site][rows[fitted]].double().numpy() for site in ("ffn_in.1", "ffn_out.1"))
        expected = torch.from_numpy(np.linalg.lstsq(x, y, rcond=None)[0].T)
        assert_near(maps["ffn_in.1", "ffn_out.1"].weight, expected, 1e-3)
    weights = [maps["attn_in.0", "attn_out.0"].weight for maps in sets.values()]
    assert not any(torch.allclose(weights[a], weights[b], rtol=1e-3) for a, b in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("first", ["stream", "submodules", "heads"])
def test_positions_are_the_same_for_all_that_a_study_collects(
    first: str, study: Callable[..., Study]
) -> None:
    tested = study("bert", draw_special=False)
    asked: dict[str, Callable[[], Activations]] = {
        "stream": lambda: tested.stream[0],
        "submodules": lambda: tested.submodule_samples,
        "heads": lambda: tested.head_samples[0],
    }
    train = [asked.pop(first)(), *(ask() for ask in asked.values())]
    assert len({samples.examples.fingerprint for samples in train}) == 1
    assert tested.validation_examples.fingerprint == tested.stream[1].examples.fingerprint
    places, lengths = train[0].places, train[0].examples.lengths
    assert bool(((places > 0) & (places < lengths - 1)).all())  # neither [CLS] nor [SEP]


def test_stand_ins_are_fitted_once(study: Callable[..., Study], monkeypatch: pytest.MonkeyPatch) -> None:
    maps = study().submodule_maps("all")["all"]
    assert {linear.weight.shape for linear in maps.values()} == {(D_MODEL, D_MODEL)}

    def fits(*_: object, **__: object) -> None:
        raise AssertionError("the stand-ins are fitted again")

    monkeypatch.setattr("studies.study.fit_submodules", fits)
    assert_same(study().submodule_maps("all")["all"], maps)
    with pytest.raises(AssertionError, match="fitted again"):
        study().submodule_maps("not-first")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, r"data\.seed: 0 in the folder, 1 now"),
        ({"n_train": N_TRAIN + 1}, rf"sentences: {N_TRAIN} in the folder, {N_TRAIN + 1} now"),
        ({"n_validation": N_VALIDATION - 2}, "data.corpus_fingerprint|data.n"),
    ],
)
@pytest.mark.parametrize("part", ["maps", "submodule_samples"])
def test_another_seed_or_size_in_the_same_folder_is_refused(
    part: str, other: dict[str, int], message: str, study: Callable[..., Study], runs: list[int]
) -> None:
    first = study()
    _ = getattr(first, part), first.stream
    before = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    runs.clear()
    with pytest.raises(InputError, match=rf"belongs to another job \(.*({message}).*Choose another folder"):
        getattr(study(**other), part)
    assert {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()} == before
    assert runs == []


def test_models_and_corpora_have_folders_of_their_own(study: Callable[..., Study], corpus: Path) -> None:
    other = corpus.with_name("other words.txt")
    shutil.copy(corpus, other)
    names = [each.folder.name for each in (study(), study("bert"), study(corpus=other))]
    elsewhere = corpus.parent / "elsewhere" / corpus.name
    elsewhere.parent.mkdir()
    shutil.copy(corpus, elsewhere)
    names.append(study(corpus=elsewhere).folder.name)
    assert len(set(names)) == 4
    stems = [re.sub(r"-[0-9a-f]{8}", "", name) for name in names]
    assert stems == ["gpt2--words.txt", "bert--words.txt", "gpt2--other words.txt", "gpt2--words.txt"]
    named = study()
    named.model.cfg.model_name, before = "some/model", named.model.cfg.model_name
    try:
        assert study().folder.name.startswith("some-model--words.txt")
    finally:
        named.model.cfg.model_name = before


def test_another_corpus_of_the_same_name_is_refused(study: Callable[..., Study], corpus: Path) -> None:
    _ = study().stream
    corpus.write_text("\n".join(reversed(corpus.read_text().splitlines())))
    with pytest.raises(InputError, match="belongs to another job"):
        _ = study().stream


def test_a_corpus_that_is_too_small_is_told_before_the_model_is_loaded(
    study: Callable[..., Study], tmp_path: Path
) -> None:
    small = replace(study(n_train=39, n_validation=2), load_model=lambda: pytest.fail("the model is loaded"))
    with pytest.raises(InputError, match=r"39\+2 sentences .* were asked for"):
        _ = small.model
    assert not (tmp_path / "out").exists()


def test_a_small_corpus_is_split_in_proportion_where_sizes_may_give_way(
    study: Callable[..., Study], capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"n_train": 90, "n_validation": 30}
    small = study(**given, adjustable=("train", "validation"))
    assert tuple(map(len, small.parts)) == small.sizes == (30, 10)
    assert "fewer than 90+30 (training+validation): it is split into 30+10." in capsys.readouterr().err
    with pytest.raises(InputError, match=r"90\+30 sentences .* were asked for.* has 40"):
        _ = study(**given).parts
    enough = study(n_train=20, n_validation=10, adjustable=("train", "validation"))
    assert enough.sizes == (20, 10)


def test_a_study_can_be_opened_as_what_it_has_written(study: Callable[..., Study]) -> None:
    fitted = study()
    _ = fitted.maps
    assert torch.equal(Activations.load(fitted.folder / "validation")[2], fitted.validation[2])
    assert_same(MapSet.load(fitted.folder / "maps"), fitted.maps)


# The trace and the clusters


def test_the_trace_is_of_the_validation_part_in_a_folder_of_the_jobs_name(
    study: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def traced(k: int = 2, **options: Any) -> Trace:
        return study(**{"n_train": 1, "n_validation": 20, "seed": 3} | options).trace(k)

    trace, begun = traced(), study()
    _, part = begun.corpus.split(n_train=1, n_validation=20, seed=3)
    examples = make_examples(begun.model, part, seed=3)
    expected = Trace.run(begun.model, examples, k=2, seed=3, progress=False)
    assert trace.examples.fingerprint == expected.examples.fingerprint
    for key, scores in expected.score.items():
        assert torch.equal(trace.score[key], scores)
    (folder,) = (tmp_path / "out" / "traces").iterdir()
    assert folder.name.startswith("gpt2-")
    assert folder.name.endswith("--20-seed3-k2")
    assert "words.txt" in folder.name
    with monkeypatch.context() as patch:
        patch.setattr("matlens.ffn.trace.stream", None)  # nothing is run again
        traced()
    for other in ({"n_validation": 10}, {"n_train": 2}, {"seed": 4}, {"k": 3}):
        traced(**other)
    assert len(list((tmp_path / "out" / "traces").iterdir())) == 5


def test_sites_of_the_validation_part_are_collected_once(
    study: Callable[..., Study], runs: list[int], tmp_path: Path
) -> None:
    sites = ["ffn_in.1", "ffn_out.1"]
    collected = study().collect_validation(sites)
    alone = collect(study().model, study().validation_examples, sites, progress=False)
    assert all(torch.equal(collected[site], alone[site]) for site in sites)
    runs.clear()
    assert list(study().collect_validation(sites)) == sites
    assert runs == []
    (folder,) = (tmp_path / "out" / "traces").iterdir()
    assert folder.name.endswith(f"--{N_TRAIN}+{N_VALIDATION}-seed0-stream")


def test_clusters_are_fitted_once_for_each_model_number_and_method(
    small_model: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clusters(name: str, n: int, memory: float) -> Clusters:
        return Study(load_model=lambda: small_model(name), out=tmp_path).clusters(n, memory=memory)

    jobs = [("llama", 20, 4.0), ("llama", 20, 0.0), ("llama", 21, 4.0), ("bert", 20, 4.0)]
    first = [clusters(*job) for job in jobs]
    assert len(list((tmp_path / "clusters").iterdir())) == len(jobs)
    monkeypatch.setattr("matlens.ffn.clusters.agglomerate", lambda *_: 1 / 0)
    for job, before in zip(jobs, first, strict=True):
        again = clusters(*job)
        assert again.labels.tolist() == before.labels.tolist()
        assert again.method == ("exact" if job[2] else "neighbours")


# The main job, and studies that lack something


def test_the_main_job_is_evaluated_in_its_folder(study: Callable[..., Study], tmp_path: Path) -> None:
    main = tmp_path / "main"
    results = study(main_folder=main, pairs="last").evaluate()
    assert {path.name for path in main.iterdir()} == {
        "train", "validation", "maps", "results.csv", "results.json", "run.json"
    }  # fmt: skip
    assert results.to_csv(index=False) == (main / "results.csv").read_text()
    assert set(results[results["metric"] == "r2"]["target"]) == {N_LAYERS}


def test_pairs_that_cannot_be_fitted_are_refused_before_the_work(
    study: Callable[..., Study], runs: list[int]
) -> None:
    with pytest.raises(InputError, match="must lie before its target"):
        study(pairs=[(2, 1)]).evaluate()
    assert runs == []


def test_nothing_is_loaded_before_it_is_asked_for(tmp_path: Path) -> None:
    def loading() -> Any:
        raise AssertionError("it is loaded")

    study = Study(load_model=loading, load_corpus=loading, out=tmp_path, n_validation=2)
    for name in ("model", "corpus", "stream", "folder"):
        with pytest.raises(AssertionError, match="it is loaded"):
            getattr(study, name)


def test_a_study_without_corpus_or_sizes_says_so(small_model: Callable[[str], Any], tmp_path: Path) -> None:
    study = Study(load_model=lambda: small_model("llama"), out=tmp_path)
    assert len(study.values) > 0
    with pytest.raises(InputError, match="no corpus"):
        _ = study.corpus
    with pytest.raises(InputError, match="no sizes"):
        _ = study.parts


def test_maps_without_sinks_are_least_squares_on_all_other_samples(
    study: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("studies.study.sink_rows", upper_half)
    maps, samples = study().maps_without_sinks, study().stream[0]
    x, y = (samples[layer][~upper_half(samples)].double() for layer in (1, 2))
    expected = torch.linalg.lstsq(x, y, driver="gelsd").solution.T
    assert_near(maps[1, 2].weight, expected, 1e-3)


def test_other_sizes_are_refused_before_the_model_is_loaded(
    small_model: Callable[[str], Any], sentences: Corpus, tmp_path: Path
) -> None:
    def study(n_train: int, load_model: Callable[[], Any]) -> Study:
        return Study(
            load_model=load_model, load_corpus=lambda: sentences, out=tmp_path, main_folder=tmp_path,
            n_train=n_train, n_validation=4,
        )  # fmt: skip

    _ = study(20, lambda: small_model("gpt2")).stream
    before = tree(tmp_path)
    with pytest.raises(matlens.InputError, match=r"another job \(sentences: 20 in the folder, 19 now\)"):
        _ = study(19, lambda: pytest.fail("the model is loaded")).stream
    assert tree(tmp_path) == before
