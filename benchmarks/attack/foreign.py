"""Cases of files that others have made: corpora, prompts, archives and models, and links that are planted."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import resource
import shutil
import signal
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matlens
from attack.badness import KINDS
from attack.cases import Case, Misread
from attack.world import World
from matlens import data, plots
from matlens.io import write_results

TEXT, MODEL, PLANTED, FULL = (
    "foreign texts and archives",
    "damaged models",
    "planted links and folders",
    "a full disk",
)
_MANY = 3 * 10**5


def foreign_cases(world: World, only: str = "") -> Iterator[Case]:
    """All cases of this file."""
    for case in (*_texts(world), *_models(world), *_planted(world), *_full(world)):
        if only in case.name:
            yield case


def _contents(world: World) -> dict[str, tuple[str, bytes]]:
    """Names of files, and what is in them."""
    text = world.text.read_bytes()
    lines = [{"text": sentence} for sentence in world.sentences]
    as_json = "\n".join(map(json.dumps, lines)).encode()
    zipped = gzip.compress(as_json)
    spoilt = bytearray(gzip.compress(text))
    spoilt[-6] ^= 1
    return {
        "empty": ("a.txt", b""),
        "blank lines": ("a.txt", b"\n" * 1000),
        "short lines": ("a.txt", b"w1 w2\n" * 100),
        "one sentence": ("a.txt", world.sentences[0].encode()),
        "UTF-16": ("a.txt", text.decode().encode("utf-16")),
        "UTF-16 without a mark": ("a.txt", text.decode().encode("utf-16-le")),
        "UTF-32": ("a.txt", text.decode().encode("utf-32")),
        "latin-1": ("a.txt", "é à ü ß ö sind Buchstaben\n".encode("latin1") * 50),
        "noise": ("a.txt", bytes((17 * i * i + i) % 256 for i in range(_MANY))),
        "zeros": ("a.txt", bytes(_MANY)),
        "one long line": ("a.txt", b"w1 " * 2 * 10**7),
        "a PNG": ("a.txt", b"\x89PNG\r\n\x1a\n" + bytes(1000)),
        "JSON cut": ("a.jsonl", as_json[: len(as_json) // 2]),
        "JSON lists": ("a.jsonl", b"[1, 2]\n" * 10),
        "JSON numbers": ("a.jsonl", b"3\n" * 10),
        "JSON null": ("a.jsonl", b"null\n" * 10),
        "JSON null text": ("a.jsonl", b'{"text": null}\n' * 10),
        "JSON number text": ("a.jsonl", b'{"text": 5}\n' * 10),
        "JSON without the field": ("a.jsonl", b'{"words": "a b c d e f"}\n' * 10),
        "JSON deep": ("a.jsonl", b"[" * 10**5 + b"]" * 10**5),
        "JSON deep field": ("a.jsonl", b'{"text": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"),
        "JSON huge number": ("a.jsonl", b'{"text": 1' + b"0" * 10**5 + b"}"),
        "JSON surrogates": ("a.jsonl", b'{"text": "\\ud800 w1 w2 w3 w4 w5"}\n' * 10),
        "JSON not JSON": ("a.jsonl", text),
        "gzip cut": ("a.jsonl.gz", zipped[: len(zipped) // 2]),
        "gzip without its end": ("a.jsonl.gz", zipped[:-4]),
        "gzip of another checksum": ("a.txt.gz", bytes(spoilt)),
        "gzip empty": ("a.txt.gz", b""),
        "no gzip": ("a.txt.gz", text),
        "gzip bomb": ("a.txt.gz", gzip.compress(bytes(4 * 10**8), 1)),
        "gzip bomb of one word": ("a.txt.gz", gzip.compress(b"w" * 4 * 10**8, 1)),
        "archive cut": ("a.tar.gz", _archive({"a-sentences.txt": b"1\t" + text})[:200]),
        "archive empty": ("a.tar.gz", _archive({})),
        "archive without sentences": ("a.tar.gz", _archive({"readme.txt": b"words"})),
        "archive of a link": ("a.tar.gz", _archive({"a-sentences.txt": b""}, link="/etc/passwd")),
        "archive of a device": ("a.tar.gz", _archive({}, device="a-sentences.txt")),
        "archive that leaves": ("a.tar.gz", _archive({"../../a-sentences.txt": b"1\tw1"})),
        "archive bomb": ("a.tar.gz", _archive({"a-sentences.txt": bytes(3 * 10**8)})),
        "Leipzig without numbers": ("a-sentences.txt", b"no tab in this line at all\n" * 9),
        "zip": ("a.zip", _zip(text)),
        "xz": ("a.txt.xz", text),
        "CSV": ("a.csv", b"text\n" + text),
        "parquet": ("a.parquet", b"PAR1" + bytes(100)),
        "pickle": ("a.pkl", b"\x80\x04\x95."),
    }


def _archive(members: dict[str, bytes], *, link: str = "", device: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if link:
                member.type, member.linkname = tarfile.SYMTYPE, link
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        if device:
            member = tarfile.TarInfo(device)
            member.type, member.devmajor, member.devminor = tarfile.CHRTYPE, 1, 5
            archive.addfile(member)
    return buffer.getvalue()


def _zip(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", content)
    return buffer.getvalue()


def _texts(world: World) -> Iterator[Case]:
    contents = _contents(world)
    few = {"one sentence": 1, "latin-1": 0, "short lines": 0}

    def right(name: str) -> Callable[[Any], bool] | None:
        if name == "one sentence":
            return lambda corpus: len(corpus) == few[name]
        if name == "CSV":  # read as a text, whose first line is too short
            return lambda corpus: set(corpus.sentences) == set(world.sentences)
        if name == "JSON surrogates":  # half a pair has no character, and is shown as one that is not known
            return lambda corpus: corpus.sentences == ("\ufffd w1 w2 w3 w4 w5",)
        if name in ("no gzip", "zip", "xz"):  # what a file is packed by is seen in it, whatever it is called
            return lambda corpus: corpus.sentences == world.sentences
        return None

    def right_prompts(name: str) -> Callable[[Any], bool] | None:
        if name in ("no gzip", "zip", "xz"):
            return lambda prompts: tuple(prompts) == world.sentences
        return None

    for name, (file, content) in contents.items():

        def load(file: str = file, content: bytes = content) -> Any:
            path = _put(world, file, content)
            try:
                return data.load_corpus(str(path))
            finally:
                shutil.rmtree(path.parent)

        def prompts(file: str = file, content: bytes = content) -> Any:
            path = _put(world, file, content)
            try:
                return data.read_prompts(path)
            finally:
                shutil.rmtree(path.parent)

        yield Case(TEXT, f"load_corpus({name})", load, right(name))
        if not file.endswith((".tar.gz", ".txt")) and "text" not in name:
            yield Case(TEXT, f"read_prompts({name})", prompts, right_prompts(name))
    for bad in KINDS["path read"]:
        if bad.label in ("a_text", "3", "2.5", "['a']", "{}", "None") or "object" in bad.label:
            continue
        yield Case(TEXT, f"load_corpus({bad.label})", partial(_load_corpus, world, bad.make))


def _load_corpus(world: World, make: Callable[[World], Any]) -> Any:
    return data.load_corpus(str(make(world)))


def _is_the_model(world: World) -> Callable[[Any], bool]:
    return lambda model: matlens.models.fingerprint(model) == matlens.models.fingerprint(world.model)


def _load_model(world: World, name: str, content: bytes) -> Any:
    return matlens.load(str(_put(world, name, content)))


def _put(world: World, name: str, content: bytes) -> Path:
    path = world.fresh(name)
    path.write_bytes(content)
    return path


def _models(world: World) -> Iterator[Case]:
    """Folders of models with something wrong in them."""
    edits: dict[str, dict[str, Any]] = {
        "a million layers": {"n_layer": 10**6},
        "no layers": {"n_layer": 0},
        "negative layers": {"n_layer": -1},
        "layers as text": {"n_layer": "3"},
        "half a layer": {"n_layer": 2.5},
        "no width": {"n_embd": 0},
        "heads that do not divide": {"n_head": 5},
        "another width": {"n_embd": 64},
        "another vocabulary": {"vocab_size": 61},
        "a huge vocabulary": {"vocab_size": 10**12},
        "an unknown type": {"model_type": "bogus"},
        "a type that is none": {"model_type": 3},
        "no type": {"model_type": None},
        "an unknown activation": {"activation_function": "bogus"},
        "an encoder": {"is_encoder_decoder": True},
        "another class": {"architectures": ["BogusForCausalLM"]},
    }
    for name, edit in edits.items():
        # Of which class a model is follows from its type; the name of the class is for people.
        right = _is_the_model(world) if name == "another class" else None
        yield Case(MODEL, f"load(config with {name})", _edited(world, edit), right)
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        for way, content in (
            ("empty", b""),
            ("noise", bytes(range(256)) * 9),
            ("deep", b"[" * 10**5),
            ("null", b"null"),
            ("UTF-16", '{"a": 1}'.encode("utf-16")),
            ("cut", None),
        ):
            yield Case(MODEL, f"load({way} {file})", _replaced(world, file, content))
        if file != "tokenizer_config.json":
            yield Case(MODEL, f"load(without {file})", _replaced(world, file, None, gone=True))
    yield Case(MODEL, "load(an encoder and a decoder)", lambda: matlens.load(str(world.model_folder("t5"))))
    yield Case(MODEL, "collect(weights with NaN)", lambda: world.collected("nan"))
    for name, content in (("a.gguf", b""), ("a.gguf", b"GGUF" + bytes(100)), ("a.bin", b"noise")):
        yield Case(
            MODEL,
            f"load({name}, {len(content)} bytes)",
            partial(_load_model, world, name, content),
        )


def _copy_of_model(world: World) -> Path:
    folder = world.fresh("model")
    shutil.copytree(world.model_folder("gpt2"), folder)
    return folder


def _edited(world: World, edit: dict[str, Any]) -> Callable[[], Any]:
    def run() -> Any:
        folder = _copy_of_model(world)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | edit))
        return matlens.load(str(folder), device="cpu")

    return run


def _replaced(world: World, name: str, content: bytes | None, *, gone: bool = False) -> Callable[[], Any]:
    def run() -> Any:
        folder = _copy_of_model(world)
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2] if content is None else content)
        if gone:
            (folder / name).unlink()
        model = matlens.load(str(folder), device="cpu")
        return matlens.make_prompts(model, [world.sentences[0]])

    return run


def _planted(world: World) -> Iterator[Case]:
    """Links that stand where a file is about to be written; what they lead to must stay as it is."""
    writers: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
        "collect": (
            lambda folder: matlens.collect(world.model, world.examples, folder=folder, progress=False),
            (
                "unfinished.json",
                "unfinished.json.partial",
                "config.json",
                "config.json.partial",
                "h.0.npy",
                "batches_done",
            ),
        ),
        "MapSet.save": (
            world.stream_maps.save,
            ("config.json", "h.0.safetensors", "h.0.safetensors.partial"),
        ),
        "write_results": (
            lambda folder: write_results(folder, "a", world.quality, {}),
            ("a.csv", "a.json", "a.csv.partial", "a.json.partial"),
        ),
        "plots.save": (
            lambda folder: plots.save(plots.r2_heatmaps(_fit(world)), folder, "r2"),
            ("r2.png", "r2.pdf", ".r2.png", ".r2.pdf"),
        ),
    }
    for writer, (write, names) in writers.items():
        for name in names:
            yield Case(
                PLANTED,
                f"{writer}({name} is a link)",
                _with_victim(world, write, name),
                lambda r: r == "unhurt",
            )


def _fit(world: World) -> Any:
    return world.quality[world.quality["experiment"] == "fit_quality"]


def _with_victim(world: World, write: Callable[[Path], Any], name: str) -> Callable[[], str]:
    def run() -> str:
        folder, victim = world.fresh("out"), world.fresh("victim")
        folder.mkdir()
        victim.write_text("precious")
        (folder / name).symlink_to(victim)
        try:
            write(folder)
        finally:
            if victim.read_text() != "precious":
                raise Misread("what the link leads to was written over")
        return "unhurt"

    return run


def _full(world: World) -> Iterator[Case]:
    """A file system on which no file may be longer than a little."""
    writers: dict[str, Callable[[Path], Any]] = {
        "collect": lambda f: matlens.collect(world.model, world.examples, folder=f, progress=False),
        "MapSet.save": world.stream_maps.save,
        "write_results": lambda f: write_results(f, "a", world.quality, {}),
        "plots.save": lambda f: plots.save(plots.r2_heatmaps(_fit(world)), f, "r2"),
    }
    for name, write in writers.items():
        for size in (0, 100, 2000):
            yield Case(FULL, f"{name}(files of {size} bytes at most)", _limited(world, write, size))


def _limited(world: World, write: Callable[[Path], Any], size: int) -> Callable[[], Any]:
    def run() -> Any:
        folder = world.fresh("out")
        with files_of_at_most(size):
            write(folder)
        if folder.is_dir():
            raise Misread(f"written as if there were room: {os.listdir(folder)}")

    return run


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let writing past a size fail, as it does where a disk is full."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
