"""Mutations of files: bits flipped, ends cut, numbers edited, files exchanged; and what is read then."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from attack.artifacts import ARTIFACTS, Artifact, Pristine
from attack.cases import Case, Misread, Unnamed
from attack.meaning import meaning
from attack.world import World
from matlens import InputError

Mutation = Callable[[random.Random, Path, Path], str | None]


def _files(folder: Path, suffix: str = "") -> list[Path]:
    return sorted(path for path in folder.rglob(f"*{suffix}") if path.is_file() and path.suffix in _READ)


_READ = (".json", ".jsonl", ".npy", ".safetensors", ".csv", ".js", ".html", "")


def _any(chance: random.Random, folder: Path, suffix: str = "") -> Path | None:
    files = [path for path in _files(folder, suffix) if path.stat().st_size and path.name != ".lock"]
    return chance.choice(files) if files else None


def _bytes_changed(change: Callable[[random.Random, bytearray], bytearray | bytes]) -> Mutation:
    def mutate(chance: random.Random, folder: Path, _: Path) -> str | None:
        path = _any(chance, folder)
        if path is None:
            return None
        path.write_bytes(change(chance, bytearray(path.read_bytes())))
        return path.name

    return mutate


def _flip(chance: random.Random, content: bytearray) -> bytearray:
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return content


def _cut(chance: random.Random, content: bytearray) -> bytearray:
    return content[: chance.randrange(len(content))]


def _zero(chance: random.Random, content: bytearray) -> bytearray:
    start = chance.randrange(len(content))
    end = min(start + 1 + chance.randrange(64), len(content))
    content[start:end] = bytes(end - start)
    return content


def _noise(chance: random.Random, content: bytearray) -> bytearray:
    start = chance.randrange(len(content))
    end = min(start + 1 + chance.randrange(16), len(content))
    content[start:end] = chance.randbytes(end - start)
    return content


def _more(chance: random.Random, content: bytearray) -> bytearray:
    return content + chance.randbytes(1 + chance.randrange(64))


def _doubled(_: random.Random, content: bytearray) -> bytearray:
    return content + content


def _delete(chance: random.Random, folder: Path, _: Path) -> str | None:
    path = _any(chance, folder)
    if path is not None:
        path.unlink()
    return None if path is None else path.name


def _swap(chance: random.Random, folder: Path, _: Path) -> str | None:
    first = _any(chance, folder)
    same = [] if first is None else [path for path in _files(folder, first.suffix) if path != first]
    if first is None or not same:
        return None
    second = chance.choice(same)
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    return f"{first.name} and {second.name}"


def _foreign(chance: random.Random, folder: Path, other: Path) -> str | None:
    """A file of another model's artifact of the same kind, in the place of this one's."""
    path = _any(chance, folder)
    there = None if path is None else other / path.relative_to(folder)
    if path is None or there is None or not there.is_file():
        return None
    shutil.copyfile(there, path)
    return path.name


def _no_file(chance: random.Random, folder: Path, _: Path) -> str | None:
    """A folder, a pipe, a device or a loop where a file was."""
    path = _any(chance, folder)
    if path is None:
        return None
    path.unlink()
    kind = chance.randrange(4)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == 2 else path.name)
    return path.name


def _blank(chance: random.Random, folder: Path, _: Path) -> str | None:
    """All rows of a file are zeros, as a disk leaves them that was not written to."""
    path = _any(chance, folder, ".npy")
    if path is None:
        return None
    content = path.read_bytes()
    start = 10 + int.from_bytes(content[8:10], "little")
    path.write_bytes(content[:start] + bytes(len(content) - start))
    return path.name


def _header(chance: random.Random, folder: Path, _: Path) -> str | None:
    """Another shape, order or kind of numbers in the header of a ``.npy`` file."""
    path = _any(chance, folder, ".npy")
    if path is None:
        return None
    content = path.read_bytes()
    size = int.from_bytes(content[8:10], "little")
    text = content[10 : 10 + size].decode("latin1")
    change = chance.choice(
        [
            lambda text: (
                text.replace("'<f4'", "'<i4'").replace("'<i8'", "'<f8'").replace("'<i4'", "'<u4'", 1)
            ),
            lambda text: text.replace("False", "True "),
            lambda text: re.sub(r"\((\d+), (\d+)\)", r"(\2, \1)", text),
            lambda text: re.sub(r"\((\d+),", lambda shape: f"({int(shape[1]) * 10**9},", text),
            lambda text: re.sub(r"\((\d+),", lambda shape: f"({max(int(shape[1]) - 1, 0)},", text),
            lambda text: text.replace("'<", "'>"),
            lambda text: text.replace("'<f4'", "'|O' "),
            lambda text: text.replace("{", "[", 1),
        ]
    )
    changed = change(text).encode("latin1")[:size].ljust(size)
    path.write_bytes(content[:10] + changed + content[10 + size :])
    return path.name


def _column(chance: random.Random, folder: Path, _: Path) -> str | None:
    """Other numbers, sound in themselves: one NaN, one infinity, another sign, or two rows exchanged."""
    path = _any(chance, folder, ".npy")
    if path is None:
        return None
    try:
        rows = np.array(np.load(path))
    except ValueError:
        return None
    if not rows.size:
        return None
    flat, place = rows.reshape(-1), chance.randrange(rows.size)
    kind = chance.randrange(4)
    if rows.dtype.kind == "f" and kind < 2:
        flat[place] = np.nan if kind == 0 else np.inf
    elif kind == 2 and len(rows) > 1:
        rows[[0, -1]] = rows[[-1, 0]]
    else:
        flat[place] = flat[place] + 1
    np.save(path, rows)
    return path.name


def _number(chance: random.Random, folder: Path, _: Path) -> str | None:
    """Another number, word, key or kind of value somewhere in a JSON file."""
    path = _any(chance, folder, ".json")
    if path is None:
        return None
    content = json.loads(path.read_text())
    places = list(_places(content))
    if not places:
        return None
    holder, key = chance.choice(places)
    value = holder[key]
    kind = chance.randrange(6)
    if kind == 0 and isinstance(holder, dict):
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    elif kind == 2:
        holder[key] = chance.choice([None, [], {}, "x", -1, 10**30, 1e400, True, [[[]]], ["h.0"]])
    elif isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int | float):
        holder[key] = value + chance.choice([1, -1, 1000])
    elif isinstance(value, str):
        holder[key] = value[:-1] + chance.choice("abc0") if value else "a"
    elif isinstance(value, list):
        holder[key] = value[:-1] if value else [1]
    elif isinstance(value, dict):
        holder[key] = {}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return f"{path.name}, {key}"


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(items):
        yield content, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _json(chance: random.Random, folder: Path, _: Path) -> str | None:
    """JSON that no program should choke on: deep, huge, repeated, no object, or none at all."""
    path = _any(chance, folder, ".json")
    if path is None:
        return None
    path.write_text(
        chance.choice(
            [
                "[" * 10**5 + "]" * 10**5,
                '{"a":' * 10**5 + "1" + "}" * 10**5,
                '{"layout": 1' + "0" * 10**5 + "}",
                "null",
                "[]",
                '"text"',
                "\ufeff" + path.read_text(),
                path.read_text().replace("{", '{"layout": 3, ', 1),
                "NaN",
                "",
            ]
        ),
        encoding=chance.choice(["utf-8", "utf-16"]),
    )
    return path.name


MUTATIONS: dict[str, Mutation] = {
    "a bit flipped": _bytes_changed(_flip),
    "cut": _bytes_changed(_cut),
    "bytes zeroed": _bytes_changed(_zero),
    "bytes of noise": _bytes_changed(_noise),
    "bytes appended": _bytes_changed(_more),
    "doubled": _bytes_changed(_doubled),
    "deleted": _delete,
    "two exchanged": _swap,
    "of another artifact": _foreign,
    "no file": _no_file,
    "rows blank": _blank,
    "header edited": _header,
    "numbers edited": _column,
    "JSON edited": _number,
    "JSON replaced": _json,
}


def mutation_cases(world: World, n: int, seed: int, only: str = "") -> Iterator[Case]:
    """So many mutations, in turn of every kind of folder and every way."""
    pristine: dict[str, Pristine] = {}
    kinds = [artifact for artifact in ARTIFACTS if only in f"files: {artifact.name}"]
    pairs = [(artifact, name) for name in MUTATIONS for artifact in kinds]
    for number in range(n if pairs else 0):
        artifact, name = pairs[number % len(pairs)]
        if artifact.name not in pristine:
            pristine[artifact.name] = Pristine(world, artifact)
        yield _case(pristine[artifact.name], artifact, name, f"{seed}/{number}")


def _case(pristine: Pristine, artifact: Artifact, name: str, seed: str) -> Case:
    whole = meaning(pristine.meaning)

    def run() -> Any:
        with pristine.copy() as folder:
            damaged = MUTATIONS[name](random.Random(seed), folder, pristine.other)
            try:
                read = artifact.read(pristine.world, folder)
            except InputError as error:
                if damaged is not None and not _names(str(error), folder, damaged):
                    raise Unnamed(f"{damaged} is not named: {error}") from error
                raise
            if damaged is None or meaning(read) == whole:
                return "identical"
            raise Misread(f"read otherwise: {damaged}")

    return Case(
        f"files: {artifact.name}", f"{artifact.name}, {name}, {seed}", run, lambda r: r == "identical"
    )


def _names(message: str, folder: Path, damaged: str) -> bool:
    files = re.findall(r"[\w.-]+", damaged)
    return str(folder) in message or any(file in message for file in files)
