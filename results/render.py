"""Render the pages of results from their sections and the tables in ``results/``.

A page is a folder of sections, ``results/pages/paper-a/10-fit.md``, each a Jinja2 template that quotes
``results/*.csv``; together they are ``docs/results/paper-a.md``. The first section of a page, its head, is
rendered last and gets ``sections``, the links and verdicts of the others, and ``verdicts``, their counts.
With ``--check`` nothing is written: a page that differs from what its sections and tables give is shown, and
the exit status is 1.

What a section can use, besides all that Jinja2 and pandas offer:

``table("NAME", metric="precision", k=1)``
    The rows of ``results/NAME.csv`` with these cells, as a data frame; raises if there are none.
``value("NAME", method="mat", layer=3)``
    The ``value`` of the only such row.
``grid(frame, "method", "layer")``
    A Markdown table: a row per method, a column per layer, ``value`` in its cells.
``origin("NAME")`` and ``script("NAME")``
    The JSON next to a table, with the exact ``command``, and the script that made it.
``verdict(condition)``, ``verdict(condition, "same", "in part")``
    The verdict of a comparison, by a condition on the tables.
``claim(claim, paper, ours, verdict(...))``
    A row ``| claim | paper | ours | verdict |``; the verdict is counted for the section.
``costs()``
    The CPU ``seconds`` that each ``command`` took.
``section("paper-a/10-fit")``
    A section of another page: ``link`` to it and its ``verdicts``.
``rows_of("items.csv")``
    Rows of a table in the folder of the page.
``2 | number(3)``, ``0.5 | percent``, ``4000 | whole``, ``0.1 | signed(2)``
    2.000, 50%, 4,000 and +0.10.
``lens``, ``added_perplexity``, ``transfer_losses``, ``within_kinds``
    From matlens and its analyses; ``lens.savings(table)`` and the like summarize a table.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markdown.extensions.toc import slugify

from matlens import InputError, lens
from matlens.io import read_table

RESULTS = Path(__file__).resolve().parent
sys.path.append(str(RESULTS.parent / "analyses"))

from linearity_bound import within_kinds  # noqa: E402
from paper_a_sec5_corpora import transfer_losses  # noqa: E402
from pruning import added_perplexity  # noqa: E402

PAGES = RESULTS.parent / "docs" / "results"
BENCHMARKS = ("speed_", "tuned_lens", "versions")  # how tables of benchmarks begin
MADE_BY = "Make it with 'make results'."
VERDICTS = ("same", "in part", "different", "not seen")


class Verdict(str):
    """A verdict that follows from a condition; `claim` accepts no other."""


@dataclass
class Results:
    """Tables of results, as available in sections.

    Attributes
    ----------
    folder
        Where ``NAME.csv`` and ``NAME.json`` are.
    verdicts
        Verdicts of the claims of the current section.
    models
        By name and precision of a model, its first quoted table and its fingerprint.
    """

    folder: Path
    verdicts: list[Verdict] = field(default_factory=list)
    models: dict[tuple[Any, ...], tuple[str, str]] = field(default_factory=dict)

    def table(self, name: str, **cells: Any) -> pd.DataFrame:
        """Rows of a table with some cells; several values of a column are given as a list."""
        path = self._path(f"{name}.csv")
        rows = read_table(path, [], what="a table of results", made_by=MADE_BY, na_values=["", "nan"])
        alike = self.origin(name).get(
            "all_rows", {}
        )  # constant columns are in the JSON; null is a missing cell
        rows = rows.assign(**{column: math.nan if cell is None else cell for column, cell in alike.items()})
        for column, cell in cells.items():
            if column not in rows:
                raise InputError(f"{path} has no column {column!r}, but {', '.join(map(str, rows))}.")
            rows = rows[rows[column].isin(cell if isinstance(cell, list) else [cell])]
        if rows.empty and cells:
            raise InputError(f"{path} has no row of {cells}. Correct the section, or run the analysis again.")
        return rows

    def value(self, name: str, column: str = "value", **cells: Any) -> Any:
        """The value of the only row with these cells."""
        rows = self.table(name, **cells)
        if len(rows) != 1:
            raise InputError(f"{name}.csv has {len(rows)} rows of {cells}. Expected cells of a single row.")
        return rows[column].item()

    def origin(self, name: str) -> dict[str, Any]:
        """The provenance of a table, and its command."""
        origin: dict[str, Any] = json.loads(self._path(f"{name}.json").read_text())
        self._check_same_models(name, origin)
        return origin

    def _check_same_models(self, name: str, origin: dict[str, Any]) -> None:
        """Refuse a table whose model differs from that of other quoted tables."""
        for model in _models_of(origin):
            # Records without a configuration have fingerprints of whole weights, not of samples.
            called = model["base_model_name_or_path"], model.get("dtype"), "configuration" in model
            other, fingerprint = self.models.setdefault(called, (name, model["fingerprint"]))
            if fingerprint != model["fingerprint"]:
                raise InputError(
                    f"The model {called[0]} of {name}.json has the fingerprint {model['fingerprint']}, and "
                    f"that of {other}.json {fingerprint}: they were made with other weights, or by other "
                    f"versions of the fingerprint. Expected tables of one model on a page. {MADE_BY}"
                )

    def command(self, name: str) -> str:
        """The command that made a table, run from the project's folder."""
        folder = "benchmarks" if name.startswith(BENCHMARKS) else "analyses"
        return f"python {folder}/{self.origin(name)['command']}"

    def script(self, name: str) -> str:
        """The script that made a table."""
        return self.command(name).split()[1]

    def costs(self) -> pd.DataFrame:
        """CPU ``seconds`` of each command; NaN if unknown."""
        taken: dict[str, list[float]] = {}
        analyses = (path for path in self.folder.glob("*.json") if not path.stem.startswith(BENCHMARKS))
        for path in sorted(analyses):
            seconds = self.origin(path.stem).get("processor_seconds", math.nan)
            taken.setdefault(self.command(path.stem), []).append(seconds)
        rows = [(command, pd.Series(seconds).max()) for command, seconds in sorted(taken.items())]
        return pd.DataFrame(rows, columns=["command", "seconds"])  # its last table has the total

    def claim(self, claim: str, paper: str, ours: str, verdict: Verdict) -> str:
        """Format a row of a table of claims, and count its verdict for the section."""
        if not isinstance(verdict, Verdict):
            raise InputError(f"The verdict on {claim!r} must be verdict(condition), got a text.")
        self.verdicts.append(verdict)
        return f"| {claim} | {paper} | {ours} | {verdict} |"

    def _path(self, file: str) -> Path:
        path = self.folder / file
        if not path.is_file():
            raise InputError(f"There is no {path}, which a section quotes. {MADE_BY}")
        return path


def _models_of(origin: Any) -> Iterator[dict[str, Any]]:
    """All models named in the origin of a table."""
    parts = list(origin.values()) if isinstance(origin, dict) else origin if isinstance(origin, list) else []
    if isinstance(origin, dict) and {"base_model_name_or_path", "fingerprint"} <= set(origin):
        yield origin
    for part in parts:
        yield from _models_of(part)


def verdict(condition: Any, yes: str = "same", no: str = "different") -> Verdict:
    """``yes`` if the condition holds, else ``no``."""
    for word in (yes, no):
        if word not in VERDICTS:
            raise InputError(f"The verdict {word!r} is not one of {', '.join(VERDICTS)}.")
    return Verdict(yes if bool(condition) else no)


def grid(
    rows: pd.DataFrame, index: str, columns: str, *, values: str = "value", digits: int = 2,
    names: Mapping[Any, str] | None = None, corner: str = "",
) -> str:  # fmt: skip
    """Format rows as a Markdown table; ``names`` maps row keys to labels, in their order.

    ``corner`` is the label above them.
    """
    wide = rows.pivot(index=index, columns=columns, values=values)
    called = names or {line: f"`{line}`" for line in wide.index}
    missing = sorted(set(called) - set(wide.index))
    if missing:
        raise InputError(f"No rows have {', '.join(map(str, missing))} in the column {index!r}.")
    lines = [
        [corner, *(f"{column:g}" if isinstance(column, float) else str(column) for column in wide.columns)]
    ]
    lines += [[name, *(number(cell, digits) for cell in wide.loc[line])] for line, name in called.items()]
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])


def number(value: float, digits: int = 2) -> str:
    """A number with some decimals; a dash for NaN."""
    return "–" if pd.isna(value) else f"{value:.{digits}f}".replace("-0." + "0" * digits, "0." + "0" * digits)


def signed(value: float, digits: int = 2) -> str:
    """A difference with its sign."""
    return f"{value:+.{digits}f}"


def percent(value: float, digits: int = 0) -> str:
    """A share in percent."""
    return f"{value:.{digits}%}"


def whole(value: float) -> str:
    """A count with thousands separators."""
    return f"{round(value):,}"


@dataclass(frozen=True)
class Section:
    """A section of a page and its claims.

    Attributes
    ----------
    link
        Its title, as a link from another page.
    verdicts
        Counts of its verdicts, such as ``same 3, different``; a dash without comparisons.
    """

    link: str
    verdicts: str


def render(folder: Path, results: Path) -> str:
    """Render a page from its sections."""
    return _render(folder, results)[0]


def _render(folder: Path, results: Path) -> tuple[str, dict[str, Section]]:
    """A page, and its sections by file name."""
    quoted = Results(results)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, extensions=["jinja2.ext.do"], autoescape=False,  # Markdown, of our own
    )  # fmt: skip
    environment.globals |= {
        "table": quoted.table, "value": quoted.value, "origin": quoted.origin,
        "script": quoted.script, "costs": quoted.costs,
        "claim": quoted.claim, "verdict": verdict, "grid": grid,
        "lens": lens, "added_perplexity": added_perplexity,
        "transfer_losses": transfer_losses, "within_kinds": within_kinds,
        "rows_of": partial(_rows_of, folder), "section": _sections_of_pages(folder.parent, results),
    }  # fmt: skip
    environment.filters |= {"number": number, "signed": signed, "percent": percent, "whole": whole}
    head, *names = sorted(path.name for path in folder.glob("*.md"))
    texts: list[str] = []
    sections: dict[str, Section] = {}
    verdicts: list[Verdict] = []
    for name in names:
        quoted.verdicts.clear()
        texts.append(_render_section(environment, folder / name))
        heading = re.match(r"#+ (.*)", texts[-1])
        title = heading[1] if heading else ""
        link = f"[{title}]({folder.name}.md#{slugify(title, '-')})"
        sections[name.removesuffix(".md")] = Section(link, _counted(quoted.verdicts))
        verdicts += quoted.verdicts
    summary = {"sections": list(sections.values()), "verdicts": _counted(verdicts)}
    texts.insert(0, _render_section(environment, folder / head, **summary))
    return "\n\n".join(re.sub(r"\n{3,}", "\n\n", text) for text in texts) + "\n", sections


def _render_section(environment: jinja2.Environment, path: Path, **names: Any) -> str:
    try:
        return environment.get_template(path.name).render(**names).strip()
    except Exception as error:  # raised by any expression of the section
        raise InputError(f"{path}: {error}") from error


def _counted(verdicts: Sequence[str]) -> str:
    counts = {word: verdicts.count(word) for word in VERDICTS if word in verdicts}
    return ", ".join(word if count == 1 else f"{word} {count}" for word, count in counts.items()) or "–"


def _sections_of_pages(pages: Path, results: Path) -> Callable[[str], Section]:
    """A function that returns a section of any page by ``page/section``; pages are rendered once."""
    rendered = cache(lambda page: _render(pages / page, results)[1])

    def section(name: str) -> Section:
        page, _, file = name.partition("/")
        if file not in rendered(page):
            raise InputError(f"There is no section {name!r}. {page} has {', '.join(rendered(page))}.")
        return rendered(page)[file]

    return section


def _rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    """Rows of a table in the folder of a page."""
    rows = pd.read_csv(folder / name, dtype=str, keep_default_na=False)
    return [{str(column): cell for column, cell in row.items()} for row in rows.to_dict("records")]


def main(arguments: list[str], *, results: Path = RESULTS, pages: Path = PAGES) -> int:
    """Write all pages, or check the existing ones; returns the exit status."""
    stale = 0
    for folder in sorted(path for path in (results / "pages").iterdir() if path.is_dir()):
        path, text = pages / f"{folder.name}.md", render(folder, results)
        there = path.read_text() if path.is_file() else ""
        if "--check" not in arguments:
            path.write_text(text)
        elif there != text:
            stale += 1
            lines = there.splitlines(True), text.splitlines(True)
            sys.stdout.writelines(difflib.unified_diff(*lines, str(path), "what its tables give", n=0))
            print(f"{path} is not what its sections and tables give: run 'make pages'.")
    return 1 if stale else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        sys.exit(str(error))
