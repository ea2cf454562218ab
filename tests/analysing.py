"""How tests run the scripts of ``analyses/``, and what they look at in what a script leaves."""

from __future__ import annotations

import io
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from paper_a_by_hand import StudyByHand

SCRIPTS = {path.stem: path for path in sorted((Path(__file__).parents[1] / "analyses").glob("*.py"))}
OF_FFNS = [name for name in SCRIPTS if name.startswith("paper_b")]  # these fit no maps
SEARCH = "paper_b_sec4_search"
NO_CORPUS = ("paper_b_fig4_overlap", SEARCH, "compatibility")
SHEETS = "paper_b_table2_concepts"  # its first run leaves no table of numbers
CONTROL = "paper_b_table5_control"
EXITS = "paper_b_table6_early_exit"  # its table is that of no other

PRUNING, LINEARITY = "pruning", "linearity"  # evaluated on text that runs on
LENSES = "lens_report"  # of several tables

SINKS = "llama-sinks"  # excluding sinks only matters in a model that has some
N_TRAIN, N_VALIDATION, N_PATCHED = 90, 30, 12
PROMPTS = ("w1 w2 w6", "w4 w5")
Finished = Callable[[str, str], Path]  # the output folder of a script's run on a model
ByHand = Callable[..., StudyByHand]

PATCHED = [name for name, path in SCRIPTS.items() if "patched: Patched" in path.read_text()]


def sizes(n_train: int = N_TRAIN, n_validation: int = N_VALIDATION) -> list[object]:
    """The options of how many sentences there are."""
    return ["--train", n_train, "--val", n_validation, "--device", "cpu"]


def read(finished: Finished, name: str, model: str = SINKS, *, table: str = "") -> pd.DataFrame:
    """A table that a script's run on a model has left; by default the one of its name."""
    return pd.read_csv(finished(name, model) / f"{table or name}.csv")


def assert_table(path: Path, expected: pd.DataFrame) -> None:
    """A script's table is this one, as a file holds it."""
    written = io.StringIO(expected.to_csv(index=False))
    pd.testing.assert_frame_equal(pd.read_csv(path), pd.read_csv(written))


def drawn(patch: pytest.MonkeyPatch, module: Any, *figures: str) -> dict[str, list[Any]]:
    """What figures of a module are drawn from, from here on: the table of each call, by the figure's name."""
    tables: dict[str, list[Any]] = {name: [] for name in figures}

    def watch(name: str, draw: Any) -> Any:
        return lambda table, *args, **how: (tables[name].append(table), draw(table, *args, **how))[1]

    for name in figures:
        patch.setattr(module, name, watch(name, getattr(module, name)))
    return tables


def run(name: str, *options: object) -> None:
    """Run a script in this process; a refusal comes through as `SystemExit`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPTS[name]), *map(str, options)])
        patch.setenv("COLUMNS", "200")
        try:
            runpy.run_path(str(SCRIPTS[name]), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise


class Workbench:
    """Scripts with the inputs and the output folder of a test.

    Attributes
    ----------
    out
        The output folder.
    words
        The corpus.
    """

    def __init__(self, corpora: Path, model_folder: Callable[[str], Path], out: Path, capsys: Any) -> None:
        self._model_folder, self._capsys = model_folder, capsys
        self.out, self.words = out, corpora / "words.txt"

    def options(self, name: str, model: str, *more: object) -> list[object]:
        """Options of a script on a small model and the corpus, if it has one, and into the folder."""
        corpus = [] if name in NO_CORPUS else ["--corpus", self.words]
        return ["--model", self._model_folder(model), *corpus, *more, "--device", "cpu", "--out", self.out]

    def run(self, name: str, model: str, *more: object) -> str:
        """Run a script; what it prints."""
        self._capsys.readouterr()
        run(name, *self.options(name, model, *more))
        return str(self._capsys.readouterr().out)

    def table(self, name: str, **options: Any) -> pd.DataFrame:
        """A table that a script has left."""
        return pd.read_csv(self.out / f"{name}.csv", **options)

    def origin(self, name: str) -> dict[str, Any]:
        """What a table says that it comes from."""
        return dict(json.loads((self.out / f"{name}.json").read_text()))

    def assert_figure(self, name: str) -> None:
        """There is a figure, in both formats."""
        assert_figure(self.out, name)


def assert_figure(out: Path, name: str) -> None:
    """There is a figure of some size in both formats."""
    for suffix, start in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        content = (out / f"{name}.{suffix}").read_bytes()
        assert content.startswith(start)
        assert len(content) > 5_000
