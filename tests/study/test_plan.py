"""What is planned is what is written and what a model has, and sizes fit a small corpus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from studying import collect_parts, study_of

from matlens import collect, make_examples
from matlens.data.corpus import Corpus
from matlens.io.artifact import Artifact
from matlens.linear import streaming
from matlens.study import fit_maps
from matlens.study.plan import Shape, collected_bytes, fitting_sizes, format_bytes, plan_study

BIG = Shape(n_layers=32, d_model=4096, d_mlp=14336, d_vocab=128_256, n_parameters=8_030_261_248)


def written(folder: Path, *but: str) -> int:
    """Bytes of all tensors in a folder, without the headers of their files."""
    paths = [path for path in folder.glob("*.safetensors") if path.stem not in but]
    return sum(path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little") for path in paths)


@pytest.mark.parametrize("positions", ["sampled", "all"])
def test_collected_vectors_are_written_in_as_many_bytes_as_planned(
    positions: Any, small_model: Callable[[str], Any], sentences: Corpus, tmp_path: Path
) -> None:
    model = small_model("llama")
    examples = make_examples(model, sentences).head(20)
    activations = collect(model, examples, positions=positions, folder=tmp_path / "rows", progress=False)
    shape = Shape.from_model(model)
    planned = collected_bytes(shape, activations.n_rows, len(examples.tokens), 20)
    assert written(tmp_path / "rows") == planned
    of_study = plan_study(shape, 20, positions=positions, keep_rows=True, train_tokens=len(examples.tokens))
    assert of_study["collect"].disk == planned


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("pairs", ["last", "all"])
def test_all_positions_write_moments_and_a_state_of_before(
    pairs: Any,
    few: bool,
    small_model: Callable[[str], Any],
    sentences: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With states as often as can be, the disk is never fuller than planned, and it has been as full."""
    model, shape = small_model("llama"), Shape.from_model(small_model("llama"))
    study = study_of(
        model, sentences, tmp_path, n_train=4 if few else 25, n_validation=10, pairs=pairs, positions="all",
        keep_rows=False, batch_tokens=40,
    )  # fmt: skip
    train, validation = study.examples
    seen = [0]
    write = Artifact.write

    def watched(artifact: Artifact, name: str, tensors: Any) -> None:
        write(artifact, name, tensors)
        seen.append(written(tmp_path / "moments"))

    monkeypatch.setattr(streaming, "_STATE_EVERY", 0.0)
    monkeypatch.setattr(streaming, "_SHARE_OF_WRITING", 0)
    monkeypatch.setattr("matlens.linear.sums.chunk_size", lambda _: 1)  # no samples wait
    monkeypatch.setattr(Artifact, "write", watched)
    _ = study.validation
    needs = plan_study(shape, len(train), 0, positions="all", pairs=pairs, train_tokens=len(train.tokens))
    assert (len(train.tokens) < 2 * shape.d_model) is few
    assert 2 * written(tmp_path / "moments") == needs["collect"].disk
    assert written(tmp_path / "moments") < max(seen) <= needs["collect"].disk
    if not few:  # norms are kept of few samples, and a state of before has fewer
        assert max(seen) == needs["collect"].disk
    n_tokens, n_validation = len(validation.tokens), len(validation)
    assert written(tmp_path / "validation") == collected_bytes(shape, n_validation, n_tokens, n_validation)
    kept = plan_study(shape, len(train), len(train), positions="all", train_tokens=len(train.tokens))
    without = plan_study(shape, len(train), positions="all", train_tokens=len(train.tokens))
    rows = collected_bytes(shape, len(train), len(train) * (len(train.tokens) // len(train)), len(train))
    assert kept["collect"].disk - without["collect"].disk == rows


@pytest.mark.parametrize("pairs", ["last", "all"])
def test_maps_are_written_in_as_many_bytes_as_planned(
    pairs: Any, small_model: Callable[[str], Any], sentences: Corpus, tmp_path: Path
) -> None:
    model = small_model("gpt2")
    collect_parts(model, sentences, tmp_path, n_train=20, n_validation=4)
    fit_maps(tmp_path, pairs=pairs, intercept=True, progress=False)
    planned = plan_study(Shape.from_model(model), 20, pairs=pairs, intercept=True)
    assert planned["fit from collected vectors"].disk == written(tmp_path / "maps")


def test_the_configuration_tells_the_shape_that_the_weights_have(
    small_model: Callable[[str], Any],
    plain_model: Callable[[str], Any],
    model_folder: Callable[[str], Path],
) -> None:
    for name in ("llama", "gpt2", "bert", "olmoe", "qwen2-moe", "opt", "vit"):
        shape, loaded = Shape.from_name(str(model_folder(name))), Shape.from_model(small_model(name))
        # A bridge can hold queries, keys and values apart and together.
        assert shape == replace(loaded, n_parameters=shape.n_parameters)
        assert shape.n_parameters == sum(weight.numel() for weight in plain_model(name).parameters())


def test_a_model_of_two_stacks_is_as_long_as_the_longer(
    model_folder: Callable[[str], Path], plain_model: Callable[[str], Any]
) -> None:
    shape = Shape.from_name(str(model_folder("t5")))
    assert (shape.n_layers, shape.d_model, shape.d_mlp, shape.d_vocab) == (3, 32, 48, 60)
    assert shape.n_parameters == sum(weight.numel() for weight in plain_model("t5").parameters())


def test_a_model_of_eight_billion_parameters() -> None:
    """Kept are triangles and products: less than the 8.9 and 146 GB of all second moments."""
    last, all_pairs = (plan_study(BIG, 10_000, pairs=pairs) for pairs in ("last", "all"))
    d, n_layers = 4096, 32
    assert last.moments == 8 * n_layers * ((d + 1) ** 2 + (d + 1) * d)
    assert all_pairs.moments == 8 * (n_layers * (d + 1) ** 2 + 528 * (d + 1) * d)
    assert (format_bytes(last.moments), format_bytes(all_pairs.moments)) == ("8.59 GB", "75.2 GB")
    second = 8 * (n_layers + 1) * 2 * d * d, 8 * ((n_layers + 1) * d) ** 2
    assert tuple(map(format_bytes, second)) == ("8.86 GB", "146 GB")
    assert format_bytes(last["load the model"].memory) == "32.1 GB"
    streamed = [plan_study(BIG, n, positions="all") for n in (10**5, 10**6)]
    for plan in streamed:
        assert plan.moments < plan["collect"].memory == streamed[0]["collect"].memory
        assert plan.memory("collect") == plan["collect"].memory + plan.weights
        assert plan["collect"].disk == 2 * (plan.moments + 8 * n_layers)  # and a number of samples
        assert plan.memory("fit from moments") == plan["fit from moments"].memory < plan.moments / 5
        assert plan.job == (plan.memory("collect"), plan["collect"].disk + plan["fit from moments"].disk)
    rows = plan_study(BIG, 100, positions="all", keep_rows=True)
    assert rows["collect"].disk > 25 * last["collect"].disk / 100
    assert rows.job[1] == rows["collect"].disk + rows["fit from collected vectors"].disk


@given(st.integers(0, 200), st.integers(1, 300), st.integers(2, 300))
def test_a_small_corpus_is_split_in_proportion(n: int, n_train: int, n_validation: int) -> None:
    sizes = fitting_sizes(n, n_train, n_validation)
    if n_train + n_validation <= n:
        assert sizes == (n_train, n_validation)
    elif sizes != (n_train, n_validation):
        assert n - 2 <= sum(sizes) <= n
        assert sizes[0] >= 1
        assert sizes[1] >= 2
        assert abs(sizes[0] * n_validation - sizes[1] * n_train) <= n_train + n_validation
    else:  # one of the parts would be too small, which is said where the corpus is split
        share = n / (n_train + n_validation)
        assert n_train * share < 1 or n_validation * share < 2


@pytest.mark.parametrize(
    ("adjustable", "expected"),
    [
        ((), (90, 30)),
        (("train", "validation"), (30, 10)),
        (("train",), (10, 30)),
        (("validation",), (90, 30)),  # nothing would be left
    ],
)
def test_what_the_user_gave_is_kept(adjustable: Any, expected: tuple[int, int]) -> None:
    assert fitting_sizes(40, 90, 30, adjustable) == expected
    assert fitting_sizes(100, 90, 30, ("validation",)) == (90, 10)
