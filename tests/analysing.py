"""How tests run the scripts of ``analyses/``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = {path.stem: path for path in sorted((Path(__file__).parents[1] / "analyses").glob("*.py"))}
OF_FFNS = [name for name in SCRIPTS if name.startswith("paper_b")]  # these fit no maps
SHEETS = "paper_b_table2_concepts"  # its first run leaves no table of numbers
TRACED = ("paper_b_fig3_events", "paper_b_sec5_clusters")  # these make several tables from one trace
CONTROL = "paper_b_table5_control"
EXITS = "paper_b_table6_early_exit"  # its table is that of no other
SENTENCES = {name: ["--sentences", 12] for name in ("paper_b_fig6_dominance", CONTROL, EXITS, *TRACED)}


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


def refused(name: str, capsys: pytest.CaptureFixture[str], *options: object) -> str:
    """What a script says before it ends with code 2 and without a traceback."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run(name, *options)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert "Traceback" not in said.out + said.err
    return " ".join(said.err.split())
