"""Cases of the command line: every command, with each of its options and arguments bad in turn."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import typer

import matlens
from attack.cases import Case, Refused, Unnamed
from attack.kept import kept
from attack.world import World
from matlens.cli import main

FAULT = "the command line"
_SIZES = ("--train", "30", "--val", "10", "--ridge", "1")


@dataclass(frozen=True)
class Command:
    """A command and words that it takes as they are.

    Attributes
    ----------
    words
        The command's own words, such as ``("values", "show")``.
    given
        Gives further words that make it work; with a new folder for what it writes.
    """

    words: tuple[str, ...]
    given: Callable[[World], list[str]]


def _sampled(sizes: tuple[str, ...]) -> Callable[[World], list[str]]:
    return lambda w: [*_model(w), "--corpus", str(w.text), *sizes, "--out", str(w.fresh("out"))]


def _model(world: World) -> list[str]:
    return ["--model", str(world.model_folder("gpt2")), "--device", "cpu"]


COMMANDS = (
    Command(("run",), _sampled(_SIZES)),
    Command(("collect",), _sampled(_SIZES[:4])),
    Command(("fit",), lambda w: [str(w.copy_of_study()), "--ridge", "1"]),
    Command(("evaluate",), lambda w: [str(w.copy_of_study()), "--device", "cpu"]),
    Command(("plot",), lambda w: [str(w.copy_of_study())]),
    Command(("update",), lambda w: ["w1 w2 w3", *_model(w)]),
    Command(("values", "show"), lambda w: ["L0D1", *_model(w)]),
    Command(("values", "search"), lambda w: ["w1", *_model(w)]),
    Command(("values", "promoting"), lambda w: ["w1", *_model(w)]),
    Command(("values", "cluster"), lambda w: [*_model(w), "--clusters", "20", "--out", str(w.fresh("out"))]),
    Command(
        ("values", "explore"),
        lambda w: [*_model(w), "--neighbours", "2", "--sentences", "20", "--out", str(w.fresh("out"))],
    ),
    Command(("verify",), lambda w: [str(kept("maps")(w))]),
    Command(("plan",), lambda w: ["--model", str(w.model_folder("gpt2"))]),
    Command(("shard",), lambda w: ["--shard", "1/2", *_sampled(_SIZES[:4])(w)]),
    Command(("merge",), lambda w: [str(kept("moments")(w)), "--ridge", "1", "--out", str(w.fresh("out"))]),
    Command(("explore",), lambda w: ["w1 w2 w3", *_model(w), "--out", str(w.fresh("page.html"))]),
    Command(("serve",), lambda w: [*_model(w), "--lens", str(kept("lens")(w))]),
    Command(
        ("prune",),
        lambda w: [
            *_model(w), "--corpus", str(w.text), "--blocks", "1,", "--window", "16", "--out",
            str(w.fresh("out")),
        ],
    ),
    Command(
        ("linearity",),
        lambda w: [
            *_model(w), "--corpus", str(w.text), "--window", "12", "--judged", "2", "--out",
            str(w.fresh("out")),
        ],
    ),
    Command(("cache", "show"), lambda w: []),
    Command(("cache", "clear"), lambda w: []),
    Command(("lens", "fit"), _sampled(_SIZES[:4])),
    Command(("lens", "show"), lambda w: ["w1 w2 w3", *_model(w)]),
    Command(("lens", "trajectory"), lambda w: ["w1 w2 w3", *_model(w), "--lens", str(kept("lens")(w))]),
    Command(
        ("lens", "convert"), lambda w: [str(kept("lens")(w)), str(w.fresh("lens.pt")), *_model(w)]
    ),
    Command(("lens", "push"), lambda w: [str(kept("lens")(w)), "someone/lenses"]),
    Command(("lens", "pull"), lambda w: ["someone/lenses", "--out", str(w.fresh("out"))]),
    Command(("lens", "report"), lambda w: [*_sampled(_SIZES[:4])(w), "--methods", "mat,id"]),
)  # fmt: skip


def untried_commands() -> Iterator[str]:
    """Commands that nothing above tries."""
    tried = {command.words for command in COMMANDS}
    app: Any = typer.main.get_command(importlib.import_module("matlens.cli.app").app)
    for words in _commands_of(app, ()):
        if words not in tried:
            yield "matlens " + " ".join(words)


def _commands_of(click: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if hasattr(click, "commands"):
        for name, command in click.commands.items():
            yield from _commands_of(command, (*words, name))
    else:
        yield words


_TEXTS = ("", "bogus", "\x1b[31mred", "x" * 10**5, "a\nb")
_BAD: dict[str, tuple[str, ...]] = {
    "integer": ("x", "", "1.5", "nan", "1e3", "--", "0x10"),
    "float": ("x", "", "nan", "inf", "-inf", "1,5", "-1"),
    "choice": ("bogus", "", "ALL", "x" * 10**5),
    "path": ("", "/dev/null/x", "/proc/nothing/there", "x" * 5000),
    "text": _TEXTS,
}
# Whole numbers that are past what an option allows, where it has a bound.
_PAST: dict[str, tuple[str, ...]] = {
    "train": ("0", "-1", "1000000", "1" + "0" * 40), "val": ("1", "0", "-1", "1000000"),
    "seed": ("-1", str(2**63), "1" + "0" * 40), "batch_tokens": ("0", "-1"), "limit": ("0", "-1"),
    "ridge": ("-1", "nan", "inf"), "tokens": ("0", "-1", "61", "1" + "0" * 40), "dominant": ("0", "-1", "49"),
    "layer": ("3", "-4", "99", "1" + "0" * 40), "position": ("3", "-4", "1" + "0" * 40),
    "clusters": ("0", "-1", "145", "1" + "0" * 40), "memory": ("-1", "nan", "inf"),
    "among": ("0", "-1", "61"),
    "pairs": ("0", "0:", "3:0", "0:99", "a:b", "0:3,", "0:1:2", ":", "1" + "0" * 40 + ":3", "0.5:2"),
    "names": ("L0", "L9D0", "L0D99", "L0D1.5", "", "L" + "9" * 5000 + "D0", "x" * 10**5),
    "words": ("absent", "", " ", "w1 w2", "x" * 10**5), "prompt": ("", " ", "w1 " * 10**4),
    "model": ("/nowhere", ".", "/dev/null", "no/such model", "x" * 10**4, "a\nb"),
    "corpus": ("/nowhere.txt", ".", "/dev/null", "no/such dataset", "x" * 10**4, "a\nb"),
    "device": ("gpu", "cuda:99", "", "meta", "x" * 1000), "field": (), "split": (), "title": (),
    "plot": ("x.svg", "/nowhere", "", "/dev/null/x.png"), "csv": _BAD["path"],
    "lens": ("/nowhere", ".", "/dev/null", "", "x" * 10**4),
    "token": ("absent", "", " ", "w1 w2", "x" * 10**5),
    "pin": ("absent", "", " ", "w1 w2", "x" * 10**5), "last": ("0", "-1"),
    "source": ("/nowhere", "/dev/zero", "."),
    "target": ("/dev/null/x", "/dev/null/lens.pt"),
    "port": ("0", "-1", "80", "65536", "1" + "0" * 40),
    "blocks": ("0", "-1", "3", "99", "a", "", ",", "1,1", "0,1", "1,2,", "1.5", "1" + "0" * 40, "9" * 5000),
    "penalty": ("-1", "nan", "inf"), "window": ("0", "1", "-1", "1" + "0" * 40), "windows": ("0", "-1"),
    "judged": ("0", "1", "-1"), "sentences": ("0", "-1"), "neighbours": ("-1", "144", "1" + "0" * 40),
    "methods": ("bogus", "", ",", "mat,bogus", "ridge(-1)", "x" * 10**5), "layers": ("99", "a", "0.5", "-99"),
    "method": ("bogus", "", "ridge(-1)", "narrow(0)", "x" * 10**5), "against": ("bogus", "", "x" * 10**5),
    "prompts": ("0", "1", "-1"), "longest": ("0", "-1"), "evaluations": ("/nowhere", ".", "/dev/null", ""),
    "shard": ("0/2", "3/2", "1/0", "a/b", "1", "", "1/2/3", "-1/2", "1/1000000"),
    "shards": ("/nowhere", ".", "/dev/null", ""), "width": ("0", "-1", "1" + "0" * 40), "mlp": ("0", "-1"),
    "vocab": ("0", "-1", "1" + "0" * 40),
    "dtype": ("int8", "float64"), "revision": (), "install_completion": (), "out": _BAD["path"], "folder": (
        "/nowhere", ".", "/dev/null", "",
    ),
}  # fmt: skip


def command_cases(world: World, only: str = "") -> Iterator[Case]:
    """A case for each bad word of each command, and for each command without one, or with one too many."""
    for command in COMMANDS:
        name = " ".join(command.words)
        if only not in f"matlens {name}":
            continue
        for words, label in _attempts(world, command):
            yield Case(FAULT, f"matlens {name} {label}", _runner(world, words), _right(command, label))


def _right(command: Command, label: str) -> Callable[[Any], bool] | None:
    """An output folder may hold files of others that stay as they are, and any size is planned."""
    if command.words == ("plan",) and label.startswith(("val=", "tokens=")):
        return lambda done: "sentences, drawn positions" in done
    window = f"window={_PAST['window'][-1][:30]!r}"  # or the context, where that is shorter
    if command.words == ("prune",) and label in ("blocks='0'", "blocks='1,2,'", window):
        return lambda done: "Judged on other text" in done
    if command.words == ("linearity",) and label == window:
        return lambda done: "linearity.csv" in done
    if label != "out=full":
        return None
    return lambda done: done.endswith("others as they were")


def _attempts(world: World, command: Command) -> Iterator[tuple[Callable[[], list[str]], str]]:
    click: Any = typer.main.get_command(importlib.import_module("matlens.cli.app").app)
    for word in command.words:
        click = click.commands[word]
    if command.given(world):
        yield (lambda: [*command.words]), "(nothing)"
    yield (lambda: [*command.words, *command.given(world), "--bogus"]), "--bogus"
    yield (lambda: [*command.words, *command.given(world), "--model"]), "--model without a value"
    arguments = [parameter for parameter in click.params if parameter.param_type_name == "argument"]
    for parameter in click.params:
        place = arguments.index(parameter) if parameter in arguments else 0
        if parameter.name == "help" or getattr(parameter, "is_flag", False):
            continue
        for value in _bad(parameter):
            yield _with(world, command, parameter, value, place), f"{parameter.name}={value[:30]!r}"
        if parameter.name == "out" and parameter.opts == ["--out"] and command.words == ("explore",):
            yield _with_path(world, command, parameter, "fifo"), "out=fifo"  # a text is replaced by a page
        elif parameter.param_type_name == "option" and parameter.name in ("out", "folder"):
            for kind in ("fifo", "text", "full"):
                yield _with_path(world, command, parameter, kind), f"{parameter.name}={kind}"


def _bad(parameter: Any) -> tuple[str, ...]:
    listed = _PAST.get(parameter.name, ())
    kind = parameter.type_descriptor.annotation
    if parameter.name in _PAST and kind in (str, Path):
        return listed
    by_kind = {int: "integer", float: "float", str: "text", Path: "path"}.get(kind, "choice")
    return (*_BAD[by_kind], *listed)


def _with(
    world: World, command: Command, parameter: Any, value: str, place: int = 0
) -> Callable[[], list[str]]:
    """Give a parameter a value; an argument is in a place among the arguments."""

    def words() -> list[str]:
        given = command.given(world)
        if parameter.param_type_name == "argument":
            n = next((i for i, word in enumerate(given) if word.startswith("-")), len(given))
            leading = given[:n]
            leading[place : place + 1] = [value]
            return [*command.words, *given[n:], "--", *leading]
        return [*command.words, *given, parameter.opts[0], value]

    return words


def _with_path(world: World, command: Command, parameter: Any, kind: str) -> Callable[[], list[str]]:
    from attack.badness import KINDS

    labels = {"fifo": "a_fifo", "text": "a_text", "full": "a_folder_of_others"}
    (bad,) = (bad for bad in KINDS["path written"] if bad.label == labels[kind])
    return lambda: [*command.words, *command.given(world), parameter.opts[0], str(bad.make(world))]


def _runner(world: World, words: Callable[[], list[str]]) -> Callable[[], Any]:
    def run() -> Any:
        arguments = words()
        code, out, err = invoke(world, arguments)
        if code == 0:
            last = len(arguments) - [*arguments[::-1], "--out"].index("--out")  # given twice, the last counts
            others = Path(*arguments[last : last + 1], "other.txt")
            kept = others.is_file() and others.read_text() == "something else"
            done = f"exit code 0: {' '.join(out.split())[:200]}"
            return f"{done}; others as they were" if kept else done
        if "Traceback" in err or "Traceback" in out:
            raise RuntimeError(err[-300:])
        if code != 2:
            raise Unnamed(f"exit code {code}: {err[:300]}")
        if "\x1b[31m" in err:
            raise Unnamed("an escape sequence of the user's reaches the terminal")
        if "--out" in arguments:
            out_folder = Path(arguments[arguments.index("--out") + 1])
            if out_folder.is_dir() and any(out_folder.iterdir()):
                raise Unnamed(f"refused only after something was written: {' '.join(err.split())[:200]}")
        raise Refused(" ".join(err.split()))

    return run


def invoke(world: World, arguments: list[str]) -> tuple[int, str, str]:
    """Run a command line in this process: its exit code, and what it prints."""
    whole, folder = matlens.load, str(world.model_folder("gpt2"))

    def load(name: str, **options: Any) -> Any:
        plain = options.get("revision") is None and str(options.get("dtype", "")) in ("", "torch.float32")
        if name == folder and plain and options.get("device") in (None, "cpu"):
            return world.model
        return whole(name, **options)

    out, err = io.StringIO(), io.StringIO()
    environment = {
        "COLUMNS": "200", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1",
        "MATLENS_CACHE": str(world.root / "cache-of-commands"),
    }  # fmt: skip
    with (
        mock.patch("matlens.models.loading.load", load),
        mock.patch.object(sys, "argv", ["matlens", *arguments]),
        mock.patch("matlens.explorer.server.run_server", return_value=None),
        mock.patch.dict("os.environ", environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            code: Any = 0
        except SystemExit as stop:
            code = stop.code or 0
    return int(code), out.getvalue(), err.getvalue()
