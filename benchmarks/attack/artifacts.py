"""The folders that matlens writes, what they mean when they are read, and the jobs that go on in them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import annotation

import matlens
from attack.world import N_CLUSTERS, World
from matlens import data, explorer, ffn, lens, linearity, pruning, study
from matlens.activations import StoredMoments, stream_moments, sums
from matlens.explorer import value_pages
from matlens.io import RowFiles
from matlens.linear import sums as pair_sums
from matlens.linearity import atlas


@dataclass(frozen=True)
class Artifact:
    """A kind of folder.

    Attributes
    ----------
    name
        What it is called in the table.
    write
        Writes it into a new folder.
    read
        Gives all that it means to who reads it: every number and every word.
    other
        Writes one of another model or of other sizes, whose files are put into this one.
    plain
        Names of files that are plain texts of others, which anyone may edit.
    """

    name: str
    write: Callable[[World, Path], Any]
    read: Callable[[World, Path], Any]
    other: Callable[[World, Path], Any] | None = None
    plain: tuple[str, ...] = ()


def _maps(folder: Path) -> Any:
    maps = matlens.MapSet.load(folder)
    return {str(pair): (linear.weight, linear.bias) for pair, linear in maps.held().items()}, maps.provenance


def _activations(folder: Path) -> Any:
    activations = matlens.activations.Activations.load(folder)
    vectors = {site: activations[site] for site in activations}
    return vectors, activations.examples, activations.positions, activations.provenance


def _trace(folder: Path) -> Any:
    trace = ffn.Trace.load(folder)
    _ = trace.before, trace.after, trace.rank, trace.index  # read when they are first looked at
    return {name: value for name, value in vars(trace).items() if not name.startswith("_")}


def _clusters(folder: Path) -> Any:
    clusters = ffn.Clusters.load(folder)
    return clusters.labels, clusters.method, clusters.sizes, clusters.provenance


def _study(world: World, folder: Path) -> Any:
    """Everything in it, and its results computed once more from what it holds."""
    parts = (_activations(folder / "train"), _activations(folder / "validation"), _maps(folder / "maps"))
    table = study.read_results(folder)
    maps = matlens.MapSet.load(folder / "maps")
    validation = matlens.activations.Activations.load(folder / "validation")
    again = lens.fit_quality(maps, validation, progress=False)
    return parts, table, again


def _run_study(world: World, folder: Path) -> None:
    world.make_study(folder).evaluate()


def _collect(model: str) -> Callable[[World, Path], Any]:
    def write(world: World, folder: Path) -> Any:
        bridge = world.load(model)
        examples = matlens.make_examples(bridge, world.corpus)
        return matlens.collect(bridge, examples, folder=folder, batch_tokens=100, progress=False)

    return write


def _write_trace(model: str) -> Callable[[World, Path], Any]:
    def write(world: World, folder: Path) -> Any:
        bridge = world.load(model)
        examples = matlens.make_examples(bridge, world.corpus)
        return ffn.Trace.run(bridge, examples, k=4, folder=folder, batch_tokens=100, progress=False)

    return write


def _write_clusters(n: int) -> Callable[[World, Path], Any]:
    return lambda world, folder: ffn.Clusters.fit(world.values, n, folder=folder, progress=False)


class BrokenOff(KeyboardInterrupt):
    """Someone has stopped a job."""


def _half(write: Callable[[World, Path], Any], *, after: int = 3) -> Callable[[World, Path], Any]:
    """Write an artifact, and break off after some batches, as a Ctrl-C does."""

    def written(world: World, folder: Path) -> None:
        with breaking_off(after):
            try:
                write(world, folder)
            except BrokenOff:
                return
        raise AssertionError("the job was done before it was broken off")

    return written


@contextmanager
def breaking_off(after: int) -> Iterator[None]:
    """Stop jobs that write rows after so many batches."""
    write, count = RowFiles.write, [0]

    def counting(self: RowFiles, *arguments: Any) -> None:
        write(self, *arguments)
        count[0] += 1
        if count[0] >= after:
            raise BrokenOff

    with mock.patch.object(RowFiles, "write", counting):
        yield


def _resumed(
    write: Callable[[World, Path], Any], read: Callable[[Path], Any]
) -> Callable[[World, Path], Any]:
    """Go on with what was broken off, and read what came of it."""

    def meaning_of(world: World, folder: Path) -> Any:
        write(world, folder)
        return read(folder)

    return meaning_of


def _predictions(world: World, folder: Path) -> None:
    folder.mkdir(parents=True)
    world.table_of_predictions.to_csv(folder / "predictions.csv", index=False, lineterminator="\n")
    annotation.write_concept_sheets(world.sample, folder / "sheets")


# What has come since


def _lens(folder: Path) -> Any:
    read = matlens.Lens.load(folder)
    return {layer: held.parts for layer, held in read.maps.items()}, read.method, read.provenance


def _stream_moments(model: str) -> Callable[[World, Path], Any]:
    def write(world: World, folder: Path) -> Any:
        bridge = world.load(model)
        examples = matlens.make_examples(bridge, world.corpus)
        with mock.patch.object(pair_sums, "chunk_size", return_value=150):  # so that there are several
            return stream_moments(bridge, examples, folder, pairs="all", batch_tokens=100, progress=False)

    return write


def _moments(folder: Path) -> Any:
    kept = StoredMoments(folder)
    return {source: kept.moments(source).state for source in kept.targets}, kept.provenance


def _half_of_moments(write: Callable[[World, Path], Any]) -> Callable[[World, Path], Any]:
    """Moments of which a state is kept after every batch, broken off after the second."""

    def written(world: World, folder: Path) -> None:
        keep, count = sums._States.write, [0]

        def counting(self: Any, *arguments: Any) -> None:
            keep(self, *arguments)
            count[0] += 1
            if count[0] == 2:
                raise BrokenOff

        with (
            mock.patch.object(sums._States, "are_due", return_value=True),
            mock.patch.object(sums._States, "write", counting),
            suppress(BrokenOff),
        ):
            write(world, folder)
            raise AssertionError("the job was done before it was broken off")

    return written


def _atlas(world: World, folder: Path, model: str = "gpt2") -> Any:
    bridge = world.load(model)
    fitted, judged = (
        data.make_judged_text(bridge, world.corpus, size=12, most=most, seed=most) for most in (20, 3)
    )
    return linearity.linearity_atlas(bridge, fitted, judged, folder=folder, jumps=[2], progress=False)


def _read_atlas(world: World, folder: Path) -> Any:
    return _atlas(world, folder), linearity.atlas_seconds(folder)


def _half_of_atlas(model: str) -> Callable[[World, Path], Any]:
    """An atlas of which the scores and the first layer are noted."""

    def written(world: World, folder: Path) -> None:
        run, count = atlas.run_variants, [0]

        def running(*arguments: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] == 2:
                raise BrokenOff
            return run(*arguments, **options)

        with mock.patch.object(atlas, "run_variants", running), suppress(BrokenOff):
            _atlas(world, folder, model)
            raise AssertionError("the job was done before it was broken off")

    return written


def _write_pages(model: str) -> Callable[[World, Path], Any]:
    def write(world: World, folder: Path) -> Any:
        return explorer.write_value_pages(
            world.load(model), folder, corpus=world.corpus, k=3, among=6, neighbours=2, n_best=2,
            progress=False,
        )  # fmt: skip

    return write


def _half_of_pages(write: Callable[[World, Path], Any]) -> Callable[[World, Path], Any]:
    """Pages of which two layers of three are written."""

    def written(world: World, folder: Path) -> None:
        keep = value_pages.write_text

        def writing(path: Path, text: str) -> None:
            if path.name == "vectors-2-0.js":
                raise BrokenOff
            keep(path, text)

        with mock.patch.object(value_pages, "write_text", writing), suppress(BrokenOff):
            write(world, folder)
            raise AssertionError("the job was done before it was broken off")

    return written


def _contents(folder: Path) -> Any:
    """All files but what says when and by what they were made."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "config.json"}


def _pruned(folder: Path) -> Any:
    """A plain model, as transformers reads it; without its record it is a model like others."""
    return dict(matlens.load(str(folder), device="cpu").original_model.state_dict())


def _write_entries(model: str) -> Callable[[World, Path], Any]:
    def write(world: World, folder: Path) -> Any:
        return _entries(world, folder, model)

    return write


def _entries(world: World, folder: Path, model: str = "gpt2") -> Any:
    """What is answered from a cache: what is damaged there is made anew."""
    with mock.patch.dict("os.environ", {"MATLENS_CACHE": str(folder / "cache")}):
        for _ in range(2):  # the second from the cache
            opened = ffn.Catalogue(str(world.model_folder(model)), device="cpu")
            values, projection = opened.values, opened.projection()
            top = opened.top_tokens(values, projection, k=3, progress=False)
        return top.ids, top.scores, [values.layer(layer) for layer in range(values.n_layers)]


ARTIFACTS = (
    Artifact(
        "maps", lambda w, f: w.stream_maps.save(f), lambda _, f: _maps(f), lambda w, f: w.other_maps.save(f)
    ),
    Artifact("activations", _collect("gpt2"), lambda _, f: _activations(f), _collect("weights")),
    Artifact("trace", _write_trace("gpt2"), lambda _, f: _trace(f), _write_trace("weights")),
    Artifact(
        "clusters", _write_clusters(N_CLUSTERS), lambda _, f: _clusters(f), _write_clusters(N_CLUSTERS + 5)
    ),
    Artifact("study", _run_study, _study),
    Artifact("unfinished activations", _half(_collect("gpt2")), _resumed(_collect("gpt2"), _activations)),
    Artifact("unfinished trace", _half(_write_trace("gpt2")), _resumed(_write_trace("gpt2"), _trace)),
    Artifact("lens", lambda w, f: w.lens.save(f), lambda _, f: _lens(f), lambda w, f: w.other_lens.save(f)),
    Artifact("moments", _stream_moments("gpt2"), lambda _, f: _moments(f), _stream_moments("weights")),
    Artifact(
        "unfinished moments",
        _half_of_moments(_stream_moments("gpt2")),
        _resumed(_stream_moments("gpt2"), _moments),
        _half_of_moments(_stream_moments("weights")),
    ),
    Artifact(
        "value pages",
        _write_pages("gpt2"),
        _resumed(_write_pages("gpt2"), _contents),
        _write_pages("weights"),
    ),
    Artifact(
        "unfinished value pages",
        _half_of_pages(_write_pages("gpt2")),
        _resumed(_write_pages("gpt2"), _contents),
        _half_of_pages(_write_pages("weights")),
    ),
    Artifact("atlas", _atlas, _read_atlas, lambda w, f: _atlas(w, f, "weights")),
    Artifact("unfinished atlas", _half_of_atlas("gpt2"), _atlas, _half_of_atlas("weights")),
    Artifact(
        "pruned model",
        lambda w, f: pruning.save_pruned(w.pruned, f),
        lambda _, f: _pruned(f),
        lambda w, f: pruning.save_pruned(pruning.prune(w.model, w.windows, [2], progress=False), f),
        plain=("README.md",),
    ),
    Artifact("cache", _write_entries("gpt2"), _entries, _write_entries("weights")),
)


class Pristine:
    """One folder of each kind as it was written, and what it means."""

    def __init__(self, world: World, artifact: Artifact) -> None:
        self.world, self.artifact = world, artifact
        self.folder = world.root / "pristine" / artifact.name.replace(" ", "-")
        self.other = self.folder.with_name(f"{self.folder.name}-other")
        artifact.write(world, self.folder)
        if artifact.other is not None:
            artifact.other(world, self.other)
        with self.copy() as copy:
            self.meaning = artifact.read(world, copy)

    @contextmanager
    def copy(self) -> Iterator[Path]:
        """A copy to damage, at the path that it is always at, and removed afterwards."""
        place = self.world.root / "damaged" / self.folder.name
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.folder, place, symlinks=True)
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


def sources() -> Mapping[str, Artifact]:
    """Kinds of folders by name."""
    return {artifact.name: artifact for artifact in ARTIFACTS}
