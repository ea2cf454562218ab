"""Run tests with the package versions of this environment, and add a row to a table of versions tried.

``python benchmarks/versions.py --label lowest tests/linear tests/io`` runs these tests and replaces the row
``lowest`` of this Python in ``results/versions.csv``, which ``docs/results/architectures.md`` shows. Run it
in an environment of each Python and each set of versions that the project claims. The exit status is
pytest's.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import pandas as pd
import typer

from matlens.io import read_table, write_results

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformer-lens", "transformers", "numpy", "pandas", "datasets")


def main(
    tests: Annotated[list[str], typer.Argument(help="Folders and files of tests.")],
    label: Annotated[str, typer.Option(help="Name of the row, such as lowest or newest.")],
    out: Annotated[Path, typer.Option(help="Folder of the table.")] = ROOT / "results",
) -> None:
    """Run tests in this environment and add their counts to the table."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        status = subprocess.run([sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT).returncode
        suite = ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    row = {
        "versions": label, "python": platform.python_version(), **{name: version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}", "paths": " ".join(tests),
        "passed": counts["tests"] - failed - counts["skipped"], "failed": failed,
        "skipped": counts["skipped"],
    }  # fmt: skip
    path = out / "versions.csv"
    table = pd.DataFrame([row])
    if path.is_file():
        rows = read_table(path, [], what="a table of versions", made_by="benchmarks/versions.py makes it.")
        others = rows[(rows["versions"] != label) | (rows["python"].astype(str) != row["python"])]
        table = pd.concat([others, table], ignore_index=True)
    write_results(out, "versions", table, {"command": "versions.py --label LABEL TESTS"})
    raise typer.Exit(status)


if __name__ == "__main__":
    typer.run(main)
