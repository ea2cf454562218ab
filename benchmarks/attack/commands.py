"""Cases of the command line: every command, with each of its options and arguments bad in turn."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import typer

import matlens
from attack.cases import Case, Refused, Unnamed
from attack.world import World
from matlens.cli import main

FAULT = "the command line"
# What makes commands work, and small: options and arguments by name, and by a command's words before it.
GOOD: dict[str, Callable[[World], str]] = {
    "model": lambda w: str(w.model_folder),
    "corpus": lambda w: str(w.text),
    "out": lambda w: str(w.fresh("out")),
    "explore out": lambda w: str(w.fresh("page.html")),
    "folder": lambda w: str(shutil.copytree(w.saved("study"), w.fresh("study"))),
    "shards": lambda w: str(w.saved("moments")),
    "lens": lambda w: str(w.saved("lens")),
    "source": lambda w: str(w.saved("lens")),
    "target": lambda w: str(w.fresh("lens.pt")),
    "lens pull name": lambda _: "a-lens",
    **{
        name: partial(lambda _, value: value, value=value)
        for name, value in {
            "repository": "someone/lenses", "prompt": "w1 w2 w3", "words": "w1", "names": "L0D1",
            "shard shard": "1/2", "train": "30", "val": "10", "device": "cpu", "window": "16", "judged": "2",
            "sentences": "20", "neighbours": "2", "clusters": "20", "blocks": "1,", "methods": "mat,id",
        }.items()
    },
}  # fmt: skip
# Bad words by kind; and by name, where not every word is bad or others are worse. No words: any will do.
_BAD: dict[str, tuple[str, ...]] = {
    "integer": ("x", "", "1.5", "nan", "--", "0x10"),
    "float": ("x", "", "nan", "inf", "-inf", "1,5", "-1"),
    "choice": ("bogus", "", "ALL", "x" * 10**5),
    "path": ("", "/dev/null/x", "/proc/nothing/there", "x" * 5000),
    "text": ("", "bogus", "\x1b[31mred", "x" * 10**5, "a\nb"),
    **dict.fromkeys(("field", "split", "title", "revision", "name", "csv"), ()),
    "model": ("/nowhere", ".", "/dev/null", "no/such model", "x" * 10**4, "a\nb"),
    "seed": ("-1", str(2**63), "1" + "0" * 40),
    "train": ("0", "1000000", "1" + "0" * 40),
    "layer": ("3", "-4", "1" + "0" * 40),
    "position": ("3", "-4"),
    "blocks": ("-1", "3", "a", "", ",", "1,1", "0,1,2", "9" * 5000),
    "attention": ("-1", "3", "a", "", ",", "1,1"),
    "pairs": ("0", "0:", "3:0", "0:99", "a:b", "0:3,", ":", "1" + "0" * 40 + ":3"),
    "layers": ("99", "a", "0.5", "-99"),
    "prompt": ("", " ", "w1 " * 10**4),
    "folder": ("/nowhere", ".", "/dev/null", ""),
    "source": ("/nowhere", "/dev/zero", "."),
    "target": ("/dev/null/x", "/dev/null/lens.pt"),
    "plot": ("x.svg", "/nowhere", "", "/dev/null/x.png"),
    **dict.fromkeys(("shards", "lens", "maps", "results", "evaluations"), ("/nowhere", ".", "/dev/null", "")),
    "port": ("0", "-1", "80", "65536"),
}  # fmt: skip


def command_cases(world: World) -> Iterator[Case]:
    """A case for each bad word of each command, and for each command without one, or with one too many."""
    app: Any = typer.main.get_command(importlib.import_module("matlens.cli.app").app)
    for words, command in _commands_of(app, ()):
        name = " ".join(("matlens", *words))
        for more in ("--bogus", "--model"):
            yield _case(world, f"{name} {more}", partial(_line, world, (*words, more), command))
        if any(parameter.required for parameter in command.params):
            yield _case(world, f"{name} (nothing)", partial(list, words))
        for parameter in command.params:
            if parameter.name == "help" or getattr(parameter, "is_flag", False):
                continue
            for value in _bad(parameter):
                label = f"{name} {parameter.name}={value[:30]!r}"
                yield _case(world, label, partial(_line, world, words, command, {parameter.name: value}))
            if parameter.name == "out":
                for kind in ("fifo", "text", "full"):
                    label = f"{name} out={kind}"
                    yield _case(world, label, partial(_line_to, world, words, command, kind))


def _commands_of(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _commands_of(inner, (*words, name))
    else:
        yield words, command


def _bad(parameter: Any) -> tuple[str, ...]:
    kind = {int: "integer", float: "float", str: "text", Path: "path"}.get(
        parameter.type_descriptor.annotation, "choice"
    )
    if parameter.name in _BAD:
        return _BAD[parameter.name] + (_BAD[kind] if kind == "integer" else ())
    return _BAD[kind]


def _line(world: World, words: tuple[str, ...], command: Any, bad: dict[str, str] | None = None) -> list[str]:
    """A command line that works but for what is bad."""
    arguments, options = [], []
    for parameter in command.params:
        name = next((n for n in (f"{' '.join(words)} {parameter.name}", parameter.name) if n in GOOD), None)
        value = (bad or {}).get(parameter.name, GOOD[name](world) if name is not None else None)
        if value is None or (name == "lens" and "lens" not in (bad or {}) and words[0] != "lens"):
            continue
        if parameter.param_type_name == "argument":
            arguments.append(value)
        else:
            options += [parameter.opts[0], value]
    return [*words, *options, "--", *arguments]


def _line_to(world: World, words: tuple[str, ...], command: Any, kind: str) -> list[str]:
    path = world.text if kind == "text" else world.fresh(kind)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "full":
        path.mkdir()
        (path / "other.txt").write_text("something else")
    return _line(world, words, command, {"out": str(path)})


def _case(world: World, name: str, line: Callable[[], list[str]]) -> Case:
    """An output folder may hold files of others, which stay, and a page replaces a text."""
    taken = ("others as they were", "replaced")
    return Case(FAULT, name, partial(_run, world, line), lambda done: done in taken)


def _run(world: World, line: Callable[[], list[str]]) -> str:
    arguments = line()
    out = Path(arguments[arguments.index("--out") + 1]) if "--out" in arguments else None
    code, said = invoke(world, arguments)
    if code == 0:
        if out is not None and (out / "other.txt").is_file():
            return "others as they were"
        return "replaced" if out == world.text else f"exit code 0: {' '.join(said.split())[:200]}"
    if "Traceback" in said:
        raise RuntimeError(said[-300:])
    if code != 2:
        raise Unnamed(f"exit code {code}: {said[:300]}")
    if "\x1b[31m" in said:
        raise Unnamed("an escape sequence of the user's reaches the terminal")
    new = out is not None and world.root in out.parents and out.is_dir()
    if out is not None and new and any(path.name != "other.txt" for path in out.iterdir()):
        raise Unnamed(f"refused only after something was written: {' '.join(said.split())[:200]}")
    raise Refused(" ".join(said.split()))


def invoke(world: World, arguments: list[str]) -> tuple[int, str]:
    """Run a command line in this process: its exit code, and what it prints."""
    whole, folder, printed = matlens.load, str(world.model_folder), io.StringIO()

    def load(name: str, **options: Any) -> Any:
        plain = options.get("revision") is None and str(options.get("dtype", "")) in ("", "torch.float32")
        if name == folder and plain and options.get("device") in (None, "cpu"):
            return world.model
        return whole(name, **options)

    environment = {
        "COLUMNS": "200", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1",
        "MATLENS_CACHE": str(world.root / "cache-of-commands"),
    }  # fmt: skip
    with (
        mock.patch("matlens.models.loading.load", load),
        mock.patch.object(sys, "argv", ["matlens", *arguments]),
        mock.patch("matlens.explorer.server.run_server", return_value=None),
        mock.patch.dict("os.environ", environment),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        try:
            main()
            code: Any = 0
        except SystemExit as stop:
            code = stop.code or 0
    return int(code), printed.getvalue()
