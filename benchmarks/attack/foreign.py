"""Cases of files that others have made: corpora, prompts, archives and models, and links that are planted."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import resource
import shutil
import signal
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matlens
from attack.cases import Case, Misread
from attack.world import WRITERS, World
from matlens import data

TEXT, MODEL, PLANTED, FULL = (
    "foreign texts and archives",
    "damaged models",
    "planted links and folders",
    "a full disk",
)
_MANY = 3 * 10**5


def foreign_cases(world: World) -> Iterator[Case]:
    """All cases of this file."""
    yield from _texts(world)
    yield from _models(world)
    yield from _planted(world)
    yield from _full(world)


def _contents(world: World) -> dict[str, tuple[str, bytes]]:
    """Names of files, and what is in them."""
    text = world.text.read_bytes()
    zipped = gzip.compress("\n".join(json.dumps({"text": line}) for line in world.sentences).encode())
    spoilt = bytearray(gzip.compress(text))
    spoilt[-6] ^= 1
    lines = {
        "lists": "[1, 2]", "null": "null", "null text": '{"text": null}', "number text": '{"text": 5}',
        "without the field": '{"words": "a b c d e f"}', "huge number": '{"text": 1' + "0" * 10**5 + "}",
        "deep": '{"text": ' + "[" * 10**5 + "]" * 10**5 + "}", "cut": '{"text": "w1 w2',
        "surrogates": '{"text": "\\ud800 w1 w2 w3 w4 w5"}',
    }  # fmt: skip
    return {
        **{f"JSON {name}": ("a.jsonl", f"{line}\n".encode() * 10) for name, line in lines.items()},
        **{code: ("a.txt", text.decode().encode(code)) for code in ("utf-16", "utf-16-le", "utf-32")},
        "latin-1": ("a.txt", "é à ü ß ö sind Buchstaben\n".encode("latin1") * 50),
        "empty": ("a.txt", b""),
        "blank lines": ("a.txt", b"\n" * 1000),
        "short lines": ("a.txt", b"w1 w2\n" * 100),
        "one sentence": ("a.txt", world.sentences[0].encode()),
        "noise": ("a.txt", bytes((17 * i * i + i) % 256 for i in range(_MANY))),
        "one long line": ("a.txt", b"w1 " * 2 * 10**7),
        "not JSON": ("a.jsonl", text),
        "gzip cut": ("a.jsonl.gz", zipped[: len(zipped) // 2]),
        "gzip without its end": ("a.jsonl.gz", zipped[:-4]),
        "gzip of another checksum": ("a.txt.gz", bytes(spoilt)),
        "gzip bomb": ("a.txt.gz", gzip.compress(bytes(4 * 10**8), 1)),
        "no gzip": ("a.txt.gz", text),
        "archive cut": ("a.tar.gz", _archive({"a-sentences.txt": b"1\t" + text})[:200]),
        "archive without sentences": ("a.tar.gz", _archive({"readme.txt": b"words"})),
        "archive of a link": ("a.tar.gz", _archive({"a-sentences.txt": b""}, kind=tarfile.SYMTYPE)),
        "archive of a device": ("a.tar.gz", _archive({"a-sentences.txt": b""}, kind=tarfile.CHRTYPE)),
        "archive that leaves": ("a.tar.gz", _archive({"../../a-sentences.txt": b"1\tw1"})),
        "archive bomb": ("a.tar.gz", _archive({"a-sentences.txt": bytes(3 * 10**8)})),
        "Leipzig without numbers": ("a-sentences.txt", b"no tab in this line at all\n" * 9),
        "xz": ("a.txt.xz", text),
        "parquet": ("a.parquet", b"PAR1" + bytes(100)),
        "pickle": ("a.pkl", b"\x80\x04\x95."),
    }


def _archive(members: dict[str, bytes], *, kind: bytes = tarfile.REGTYPE) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, "/etc/passwd", len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _texts(world: World) -> Iterator[Case]:
    def right(name: str) -> Callable[[Any], bool] | None:
        if name == "one sentence":
            return lambda corpus: len(corpus) == 1
        if name == "JSON surrogates":  # half a pair has no character, and is shown as one that is not known
            return lambda corpus: corpus.sentences == ("\ufffd w1 w2 w3 w4 w5",)
        if name in ("no gzip", "xz"):  # what a file is packed by is seen in it, whatever it is called
            return lambda read: tuple(getattr(read, "sentences", read)) == world.sentences
        return None

    def read(load: Callable[[Any], Any], file: str, content: bytes) -> Any:
        path = _put(world, file, content)
        try:
            return load(path)
        finally:
            shutil.rmtree(path.parent)

    for name, (file, content) in _contents(world).items():
        yield Case(TEXT, f"load_corpus({name})", partial(read, data.load_corpus, file, content), right(name))
        if not file.endswith((".tar.gz", ".txt")) and "text" not in name:
            job = partial(read, data.read_prompts, file, content)
            yield Case(TEXT, f"read_prompts({name})", job, right(name))


def _put(world: World, name: str, content: bytes) -> Path:
    path = world.fresh(name)
    path.write_bytes(content)
    return path


# What is wrong in a config, in any file of a model, and in files that are no folder.
_EDITS: tuple[dict[str, Any], ...] = (
    {"n_layer": 10**6}, {"n_layer": 0}, {"n_layer": -1}, {"n_layer": "3"}, {"n_layer": 2.5}, {"n_embd": 0},
    {"n_head": 5}, {"n_embd": 64}, {"vocab_size": 61}, {"vocab_size": 10**12}, {"model_type": "bogus"},
    {"model_type": 3}, {"model_type": None}, {"activation_function": "bogus"}, {"is_encoder_decoder": True},
)  # fmt: skip
_REPLACED: dict[str, bytes | None] = {
    "empty": b"", "noise": bytes(range(256)) * 9, "deep": b"[" * 10**5, "null": b"null",
    "UTF-16": '{"a": 1}'.encode("utf-16"), "missing": None,
}  # fmt: skip


def _models(world: World) -> Iterator[Case]:
    """Models with something wrong in them."""
    config = json.loads((world.model_folder / "config.json").read_text())
    for edit in _EDITS:
        content = json.dumps(config | edit).encode()
        yield Case(MODEL, f"load(config with {edit})", partial(_load, world, "config.json", content))
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        half = (world.model_folder / file).read_bytes()
        for way, spoilt in (_REPLACED | {"cut": half[: len(half) // 2]}).items():
            if (file, way) != ("tokenizer_config.json", "missing"):
                yield Case(MODEL, f"load({way} {file})", partial(_load, world, file, spoilt))
    yield Case(MODEL, "load(an encoder and a decoder)", lambda: world.of("t5").model)
    yield Case(MODEL, "collect(weights with NaN)", lambda: world.of("nan")["Activations"])
    for name, content in (("a.gguf", b""), ("a.gguf", b"GGUF" + bytes(100)), ("a.bin", b"noise")):
        load = partial(lambda name, content: matlens.load(str(_put(world, name, content))), name, content)
        yield Case(MODEL, f"load({name}, {len(content)} bytes)", load)


def _load(world: World, name: str, content: bytes | None) -> Any:
    folder = Path(shutil.copytree(world.model_folder, world.fresh("model")))
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    return matlens.make_prompts(matlens.load(str(folder), device="cpu"), [world.sentences[0]])


def _planted(world: World) -> Iterator[Case]:
    """Links in the place of each file that is about to be written: what they lead to stays as it is."""
    for kind in ("activations", "maps", "lens", "trace", "clusters"):
        written = sorted(path.name for path in world.saved(kind).iterdir() if path.is_file())
        for name in (*written, *(f"{name}.partial" for name in written)):
            yield Case(
                PLANTED,
                f"{kind}({name} is a link)",
                partial(_with_victim, world, kind, name),
                lambda said: said == "unhurt",
            )


def _with_victim(world: World, kind: str, name: str) -> str:
    folder, victim = world.fresh("out"), world.fresh("victim")
    folder.mkdir()
    victim.write_text("precious")
    (folder / name).symlink_to(victim)
    try:
        WRITERS[kind](world, folder)
    finally:
        if victim.read_text() != "precious":
            raise Misread("what the link leads to was written over")
    return "unhurt"


def _full(world: World) -> Iterator[Case]:
    """A file system on which no file may be longer than a little."""
    for kind in ("activations", "maps", "lens", "trace", "clusters"):
        for size in (0, 100, 1000):
            case = f"{kind}(files of {size} bytes at most)"
            yield Case(FULL, case, partial(_limited, world, kind, size))


def _limited(world: World, kind: str, size: int) -> Any:
    folder = world.fresh("out")
    with files_of_at_most(size):
        WRITERS[kind](world, folder)
    raise Misread(f"written as if there were room: {folder}")


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
