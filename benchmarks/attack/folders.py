"""Cases of folders: jobs that are killed in them, and files that are damaged, exchanged or edited."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matlens
from attack.cases import Case, Misread, Unnamed
from attack.meaning import meaning
from attack.world import WRITERS, World
from matlens import InputError, activations, ffn, lens, linearity, study

_FILES = (".json", ".jsonl", ".npy", ".safetensors", ".csv", ".js", ".html", "")


def folder_cases(world: World, n: int, seed: int = 0) -> Iterator[Case]:
    """So many mutations, in turn of every kind of folder and every way, and a kill for every tenth."""
    pairs = [(kind, way) for way in (*MUTATIONS, "killed") for kind in KINDS]
    made: dict[str, Folder] = {}
    for number in range(n):
        kind, way = pairs[number % len(pairs)]
        folder = made.setdefault(kind, Folder(world, kind))
        if way != "killed":
            yield folder.mutated(way, random.Random(f"{seed}/{number}"))
        elif not kind.startswith("unfinished"):
            yield folder.killed(random.Random(f"{seed}/{number}"))


# What each kind of folder means to who reads it.


def _maps(_: World, folder: Path) -> Any:
    maps = matlens.MapSet.load(folder)
    return {str(pair): (linear.weight, linear.bias) for pair, linear in maps.held().items()}, maps.provenance


def _lens(_: World, folder: Path) -> Any:
    read = matlens.Lens.load(folder)
    return {layer: held.parts for layer, held in read.maps.items()}, read.method, read.provenance


def _activations(_: World, folder: Path) -> Any:
    read = activations.Activations.load(folder)
    return {site: read[site] for site in read}, read.examples, read.positions, read.provenance


def _trace(_: World, folder: Path) -> Any:
    trace = ffn.Trace.load(folder)
    for name in ("before", "after", "rank", "index"):  # read when they are first looked at
        getattr(trace, name)
    return {name: value for name, value in vars(trace).items() if not name.startswith("_")}


def _clusters(_: World, folder: Path) -> Any:
    clusters = ffn.Clusters.load(folder)
    return clusters.labels, clusters.method, clusters.sizes, clusters.provenance


def _moments(_: World, folder: Path) -> Any:
    stored = activations.StoredMoments(folder)
    return {source: stored.moments(source).tensors() for source in stored.targets}, stored.provenance


def _study(world: World, folder: Path) -> Any:
    """Everything in it, and its results computed from what it holds."""
    parts = _activations(world, folder / "train"), _maps(world, folder / "maps")
    maps = matlens.MapSet.load(folder / "maps")
    validation = activations.Activations.load(folder / "validation")
    return parts, study.read_results(folder), lens.fit_quality(maps, validation, progress=False)


def _pages(world: World, folder: Path) -> Any:
    """Pages are not read but written again, if something is amiss."""
    WRITERS["value pages"](world, folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "config.json"}


def _atlas(world: World, folder: Path) -> Any:
    return WRITERS["atlas"](world, folder), linearity.atlas_seconds(folder)


def _pruned(_: World, folder: Path) -> Any:
    return dict(matlens.load(str(folder), device="cpu").original_model.state_dict())


def _cached(world: World, folder: Path) -> Any:
    """What is answered from a cache: what is damaged there is made anew."""
    before = os.environ.get("MATLENS_CACHE")
    os.environ["MATLENS_CACHE"] = str(folder)
    try:
        opened = ffn.Catalogue(str(world.model_folder), device="cpu")
        top = opened.top_tokens(opened.values, opened.projection(), k=3, progress=False)
        return top.ids, top.scores, [opened.values.layer(layer) for layer in range(opened.values.n_layers)]
    finally:
        os.environ.pop("MATLENS_CACHE") if before is None else os.environ.update(MATLENS_CACHE=before)


def _resumed(kind: str) -> Callable[[World, Path], Any]:
    """Go on in a folder as if nothing had happened, and read what came of it."""

    def read(world: World, folder: Path) -> Any:
        WRITERS[kind](world, folder)
        return READERS[kind](world, folder)

    return read


READERS: dict[str, Callable[[World, Path], Any]] = {
    "maps": _maps,
    "lens": _lens,
    "activations": _activations,
    "trace": _trace,
    "clusters": _clusters,
    "moments": _moments,
    "study": _study,
    "value pages": _pages,
    "atlas": _atlas,
    "pruned model": _pruned,
}
RESUMED = ("activations", "trace", "moments", "value pages", "atlas")
KINDS = (*READERS, *(f"unfinished {kind}" for kind in RESUMED), "cache")


@dataclass(frozen=True)
class Folder:
    """A folder as it was written, finished or killed half-way, and what it means."""

    world: World
    kind: str

    @property
    def job(self) -> str:
        """The kind of folder that the job makes."""
        return self.kind.removeprefix("unfinished ")

    @cached_property
    def pristine(self) -> Path:
        """The folder, which stays as it is."""
        return self._written(self.world)

    @cached_property
    def other(self) -> Path:
        """The same of another model."""
        return self._written(self.world.of("weights"))

    def _written(self, world: World) -> Path:
        if self.kind == "cache":
            _cached(world, world.root / f"cache of {world.name}")
            return world.root / f"cache of {world.name}"
        if self.kind == self.job:
            return world.saved(self.kind)
        folder = world.root / "unfinished" / f"{self.job} of {world.name}"
        kill(lambda: WRITERS[self.job](world, folder), folder, share=0.8)
        return folder

    @property
    def read(self) -> Callable[[World, Path], Any]:
        """Gives all that it means: every number and every word."""
        if self.kind == "cache":
            return _cached
        return READERS[self.kind] if self.kind == self.job else _resumed(self.job)

    @cached_property
    def meaning(self) -> str:
        """What the undamaged folder means."""
        with self.copy() as copy:
            return meaning(self.read(self.world, copy))

    @contextlib.contextmanager
    def copy(self) -> Iterator[Path]:
        """A copy to damage, at the path that it is always at, and removed afterwards."""
        place = self.world.root / "damaged" / self.kind
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.pristine, place, symlinks=True)
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def mutated(self, way: str, chance: random.Random) -> Case:
        """The folder with a file changed: refused by name, or read as the same."""
        whole, other = self.meaning, self.other

        def run() -> str:
            with self.copy() as folder:
                path = chance.choice([each for each in _files(folder) if each.stat().st_size])
                MUTATIONS[way](chance, path, other / path.relative_to(folder))
                try:
                    read = meaning(self.read(self.world, folder))
                except InputError as error:
                    if path.name not in str(error) and str(folder) not in str(error):
                        raise Unnamed(f"{path.name} is not named: {error}") from error
                    raise
            if read != whole:
                raise Misread(f"read otherwise: {path.name}")
            return "identical"

        return Case(f"files: {self.kind}", f"{self.kind}, {way}", run, lambda r: r == "identical")

    def killed(self, chance: random.Random) -> Case:
        """The job killed before one of its writes, and run again: the same meaning."""
        whole = self.meaning

        def run() -> str:
            folder = self.world.root / "killed" / self.kind
            shutil.rmtree(folder, ignore_errors=True)
            kill(lambda: WRITERS[self.job](self.world, folder), folder, share=chance.random())
            WRITERS[self.job](self.world, folder)
            if meaning(READERS[self.job](self.world, folder)) != whole:
                raise Misread("other numbers after a kill")
            return "identical"

        return Case(f"kills: {self.kind}", f"{self.kind}, killed", run, lambda r: r == "identical")


def _files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*")
        if path.is_file() and path.suffix in _FILES and path.name != ".lock"
    )  # fmt: skip


def kill(job: Callable[[], Any], folder: Path, *, share: float) -> None:
    """Run a job in another process, which is killed after a share of the files that it opens and renames."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    n = _in_child(job, folder, stop=None)
    shutil.rmtree(folder, ignore_errors=True)
    _in_child(job, folder, stop=max(int(share * n), 1))


def _in_child(job: Callable[[], Any], folder: Path, *, stop: int | None) -> int:
    """How many files below a folder a job opens to write and renames; it ends at ``stop`` of them."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        count = [0]

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in ("open", "os.rename") or not str(arguments[0]).startswith(str(folder)):
                return
            if event == "open" and not set(str(arguments[1])) & set("wax+"):
                return
            count[0] += 1
            if count[0] == stop:
                os.kill(os.getpid(), signal.SIGKILL)

        with contextlib.suppress(BaseException):
            sys.addaudithook(hook)
            job()
        os.write(writer, str(count[0]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return int(said or 0)


# Ways to change a file, which get the same file of another model's folder too.
Mutation = Callable[[random.Random, Path, Path], Any]


def _bytes(change: Callable[[random.Random, bytearray], bytes | bytearray]) -> Mutation:
    return lambda chance, path, _: path.write_bytes(change(chance, bytearray(path.read_bytes())))


def _flip(chance: random.Random, content: bytearray) -> bytearray:
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return content


def _overwrite(chance: random.Random, content: bytearray) -> bytearray:
    start = chance.randrange(len(content))
    end = min(start + 1 + chance.randrange(64), len(content))
    content[start:end] = chance.choice([bytes(end - start), chance.randbytes(end - start)])
    return content


def _header(chance: random.Random, content: bytearray) -> bytes:
    """Another kind of numbers, order or shape in the header of a file of tensors."""
    head, rest = bytes(content[:2000]), bytes(content[2000:])
    old, new = chance.choice(
        [
            (b"F32", b"I32"), (b"F64", b"I64"), (b"<f4", b"<i4"), (b"<i8", b"<f8"), (b"False", b"True "),
            (b"[", b"{"), (b"'<", b"'>"), (b"(6", b"(5"), (b"shape", b"shapf"),
        ]
    )  # fmt: skip
    return head.replace(old, new, 1) + rest


def _number(chance: random.Random, content: bytearray) -> bytearray:
    """Another number, NaN or infinity, where a file of tensors has its last rows."""
    place = max(len(content) - 4 * chance.randrange(1, 200), 0)
    content[place : place + 4] = struct.pack("<f", chance.choice([math.nan, math.inf, 1.5]))
    return content


def _swap(chance: random.Random, path: Path, _: Path) -> None:
    others = [each for each in path.parent.iterdir() if each.suffix == path.suffix and each.is_file()]
    second = chance.choice(others)
    first_bytes, second_bytes = path.read_bytes(), second.read_bytes()
    path.write_bytes(second_bytes)
    second.write_bytes(first_bytes)


def _no_file(chance: random.Random, path: Path, _: Path) -> None:
    """A folder, a pipe, a device or a loop where a file was."""
    path.unlink()
    kind = chance.randrange(4)
    if kind < 2:
        (os.mkdir, os.mkfifo)[kind](path)
    else:
        path.symlink_to("/dev/zero" if kind == 2 else path.name)


def _json_edited(chance: random.Random, path: Path, _: Path) -> None:
    """Another number, word, key or kind of value somewhere in a JSON file."""
    try:
        content = json.loads(path.read_text())
        holder, key = chance.choice(list(places(content)))
    except (ValueError, IndexError):  # no JSON, or nothing in it
        return
    value = holder[key]
    if isinstance(holder, dict) and chance.random() < 0.3:
        holder[f"{key}x"] = holder.pop(key)
    elif isinstance(value, int) and chance.random() < 0.7:
        holder[key] = value + chance.choice([1, -1, 1000])
    else:
        holder[key] = chance.choice([None, [], {}, "x", -1, 10**30, 1e400, True, [[[]]]])
    path.write_text(json.dumps(content, indent=1) + "\n")


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every dict and list in some JSON, with each of its keys."""
    for key, value in list(content.items() if isinstance(content, dict) else enumerate(content)):
        yield content, key
        if isinstance(value, dict | list):
            yield from places(value)


def _json_replaced(chance: random.Random, path: Path, _: Path) -> None:
    """JSON that no program should choke on: deep, huge, repeated, no object, or none at all."""
    if path.suffix == ".json":
        text = path.read_text()
        deep, huge, twice = (
            "[" * 10**5 + "]" * 10**5,
            '{"a": 1' + "0" * 10**5 + "}",
            text.replace("{", '{"a": 3, ', 1),
        )
        path.write_text(
            chance.choice([deep, huge, twice, "null", "[]", '"text"', "\ufeff" + text, "NaN", ""])
        )


MUTATIONS: dict[str, Mutation] = {
    "a bit flipped": _bytes(_flip),
    "cut": _bytes(lambda chance, content: content[: chance.randrange(len(content))]),
    "overwritten": _bytes(_overwrite),
    "appended to": _bytes(lambda chance, content: content + chance.randbytes(1 + chance.randrange(64))),
    "header edited": _bytes(_header),
    "numbers edited": _bytes(_number),
    "deleted": lambda _, path, __: path.unlink(),
    "two exchanged": _swap,
    "of another model": lambda _, path, other: other.is_file() and shutil.copyfile(other, path),
    "no file": _no_file,
    "JSON edited": _json_edited,
    "JSON replaced": _json_replaced,
}
