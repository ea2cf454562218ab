"""Code blocks, published tables and the site."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from blocks import NOTEBOOKS, PROJECT
from PIL import Image

import matlens
from matlens import InputError
from matlens.io import write_results

HEAD = """# Page
{% for section in sections %}
| {{ section.link }} | {{ section.verdicts }} |
{% endfor %}
All: {{ verdicts }}
"""
SECTION = """## Fit of maps (Figure 2)

`{{ script("fit") }}`

{{ grid(table("fit", metric="r2"), "method", "layer", digits=1) }}

{% set mat = value("fit", method="mat", layer=1) %}
{{ claim("mat is better", "yes", mat | number(2) ~ " of " ~ 4000 | whole,
         verdict(mat > value("fit", method="id", layer=1))) }}
"""


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"results_{name}", PROJECT / "results" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


render, gather = script("render"), script("gather")


def write_fit(folder: Path, mat: float, **origin: object) -> None:
    rows = [("id", 0, 0.1), ("id", 1, 0.25), ("mat", 0, 0.5), ("mat", 1, mat)]
    table = pd.DataFrame(rows, columns=["method", "layer", "value"])
    table = table.assign(metric="r2", model=f"{folder}/small", low=None)
    write_results(folder, "fit", table, {"command": "fit.py --train 40 --val 2"} | origin)


@pytest.fixture
def results(tmp_path):
    page = tmp_path / "results" / "pages" / "page"
    page.mkdir(parents=True)
    (page / "00-head.md").write_text(HEAD)
    (page / "10-fit.md").write_text(SECTION)
    write_fit(tmp_path / "results", 0.75)
    return tmp_path / "results"


def run(results: Path, *arguments: str) -> int:
    return int(render.main([*arguments], results=results, pages=results.parent))


def test_committed_pages_are_what_their_tables_give():
    assert render.main(["--check"]) == 0


def test_intervals_of_the_readme_are_on_pages_of_results():
    quoted = re.findall(r"-?\d+\.\d+ \[[-\d., ]+\]", (PROJECT / "README.md").read_text())
    pages = "\n".join(path.read_text() for path in (PROJECT / "docs" / "results").glob("*.md"))
    assert quoted
    assert [each for each in quoted if each not in pages] == []


def test_a_page_has_the_numbers_of_its_tables(results):
    assert run(results) == 0
    assert (results.parent / "page.md").read_text() == (
        "# Page\n| [Fit of maps (Figure 2)](page.md#fit-of-maps-figure-2) | same |\nAll: same\n\n"
        "## Fit of maps (Figure 2)\n\n`analyses/fit.py`\n\n"
        "|  | 0 | 1 |\n|---|---|---|\n| `id` | 0.1 | 0.2 |\n| `mat` | 0.5 | 0.8 |\n\n"
        "| mat is better | yes | 0.75 of 4,000 | same |\n"
    )
    assert run(results, "--check") == 0


def test_another_number_fails_the_check_and_turns_the_verdict(results, capsys):
    run(results)
    write_fit(results, 0.2)
    assert run(results, "--check") == 1
    shown = capsys.readouterr().out
    assert "-| mat is better | yes | 0.75 of 4,000 | same |" in shown
    assert "+| mat is better | yes | 0.20 of 4,000 | different |" in shown


def test_a_cell_changed_by_hand_is_refused(results):
    path = results / "fit.csv"
    path.write_text(path.read_text().replace("0.75", "0.76"))
    with pytest.raises(InputError, match=r"10-fit.md: .*fit.csv is not the table that fit.json describes"):
        run(results, "--check")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ('{{ value("fit", method="mat") }}', r"2 rows of \{'method': 'mat'\}"),
        ('{{ table("r2") }}', r"There is no .*r2.csv.*make results"),
        ('{{ verdict(True, "fine") }}', "'fine' is not one of same, in part"),
        ("{{ unheard }}", "'unheard' is undefined"),
    ],
)
def test_a_section_that_quotes_wrongly_is_refused(results, section, message):
    (results / "pages" / "page" / "20-more.md").write_text(section)
    with pytest.raises(InputError, match=f"20-more.md: .*{message}"):
        run(results)


def test_gathered_is_what_pages_quote(results, tmp_path):
    out, images = tmp_path / "out", tmp_path / "images"
    command = f"fit.py --train 40 --out '{out}/a b' --val 2 --out=x"
    of = {"maps": [f"{out}/small", f"{out}s", 7], "hooks": {"h.0": ["blocks.0.hook_in"]}}
    write_fit(out, 2 / 3, seed="7", command=command, of=of)
    write_results(out, "unquoted", pd.DataFrame({"value": [1.0]}), {})
    images.mkdir()
    (results / "pages" / "page" / "20-more.md").write_text("![new](../images/new.png)")
    for path, color in ((out / "fit.png", "red"), (images / "fit.png", "blue"), (out / "new.png", "red")):
        Image.new("RGB", (8, 8), color).save(path)
    Image.new("RGB", (8, 8), "red").save(out / "unshown.png")
    gather.main(out, results=results, images=images)
    assert {path.name for path in results.glob("*.csv")} == {"fit.csv"}
    kept = render.Results(results)
    assert (results / "fit.csv").read_text().splitlines()[0] == "method,layer,value"
    table = kept.table("fit")
    assert list(table) == ["method", "layer", "value", "metric", "model", "low"]
    assert set(table["metric"]) == {"r2"}
    assert table["low"].isna().all()
    assert kept.value("fit", method="mat", layer=1) == 0.666667
    origin = kept.origin("fit")
    model = "out/results/small"
    assert (origin["seed"], origin["all_rows"]) == ("7", {"metric": "r2", "model": model, "low": None})
    assert origin["command"] == "fit.py --train 40 --val 2"
    assert origin["of"] == {"maps": ["out/results/small", f"{out}s", 7]}
    assert kept.command("fit") == "python analyses/fit.py --train 40 --val 2"
    before = [(results / f"fit.{kind}").read_bytes() for kind in ("csv", "json")]
    gather.main(results, results=results, images=images)  # what is gathered stays as it is
    assert [(results / f"fit.{kind}").read_bytes() for kind in ("csv", "json")] == before
    assert {path.name for path in images.glob("*.png")} == {"fit.png", "new.png"}
    assert Image.open(images / "fit.png").convert("RGB").getpixel((0, 0)) == (255, 0, 0)


def test_what_is_kept_names_no_folder_of_a_machine():
    for path in (PROJECT / "results").glob("*.json"):
        origin = path.read_text()
        assert gather.portable(json.loads(origin), "/nowhere") == json.loads(origin)
        assert not re.search(r"[\"' =]/\w+/", origin), path
    for path in (PROJECT / "results").glob("*.csv"):
        assert not re.search(r"(^|[\"' =,])/\w+/", path.read_text(), re.MULTILINE), path


def test_tables_of_one_page_are_of_one_state_of_a_model(results):
    model = {"base_model_name_or_path": "small", "fingerprint": "a", "dtype": "float32"}
    write_fit(results, 0.75, maps={"model": model})
    (results / "pages" / "page" / "20-more.md").write_text('{{ value("other", k=1) }}')

    def write_other(**changed: str) -> None:
        studies = {"studies": [{"model": model | changed}]}
        write_results(results, "other", pd.DataFrame({"k": [1], "value": [2.0]}), studies)

    for same in (
        {},
        {"dtype": "bfloat16", "fingerprint": "b"},
        {"base_model_name_or_path": "a", "fingerprint": "b"},
    ):
        write_other(**same)
        assert run(results) == 0
    write_other(fingerprint="b")
    with pytest.raises(
        InputError, match=r"20-more.md: The model small of other.json .* b, and that of fit.json a"
    ):
        run(results)


AUDIT = pd.read_csv(PROJECT / "results" / "pages" / "audit" / "items.csv", dtype=str, keep_default_na=False)


def test_what_the_audit_names_is_there():
    for name in set(AUDIT["where"]):
        if name.endswith(".py"):
            assert (PROJECT / name).is_file()
        else:
            assert functools.reduce(getattr, name.split(".")[1:], matlens).__doc__


def test_every_command_of_the_audit_is_there_and_every_analysis_in_it():
    scripts = {command.split()[0] for command in AUDIT["script"]}
    assert all((PROJECT / path).is_file() for path in scripts)
    of_papers = {f"analyses/{path.name}" for path in (PROJECT / "analyses").glob("paper_*.py")}
    assert of_papers - scripts <= {"analyses/paper_b_removal.py"}  # of no item of the paper


def test_what_is_kept_is_quoted_and_small():
    kept = PROJECT / "results"
    names = {path.stem for path in kept.glob("*.csv")}
    assert names == {path.stem for path in kept.glob("*.json")}
    assert names <= set(gather.quoted_tables(kept / "pages"))
    tables = [*kept.glob("*.csv"), *kept.glob("*.json")]
    assert sum(path.stat().st_size for path in tables) < 7 * 2**18


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=PROJECT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def anchors(page: Path) -> set[str]:
    return set(re.findall(r'id="(matlens\.[\w.]+)"', page.read_text()))


def test_every_public_name_has_its_place(site):
    top = {name: getattr(matlens, name) for name in matlens.__all__}
    rooms = {name for name, value in top.items() if isinstance(value, ModuleType)}
    index = anchors(site / "api" / "index.html")
    assert {f"matlens.{name}" for name in set(top) - rooms} <= index
    for room in rooms:
        module, shown = top[room], anchors(site / "api" / f"{room}.html")
        for name in getattr(module, "__all__", ()):
            at_top = any(getattr(module, name) is value for value in top.values())
            assert at_top or f"matlens.{room}.{name}" in shown, f"{room}: {name}"


def test_notebooks_can_be_read_and_downloaded(site):
    for path in NOTEBOOKS:
        assert (site / "notebooks" / f"{path.stem}.html").is_file()
        assert (site / "notebooks" / f"{path.stem}.ipynb").read_text().startswith("{")


def test_pages_fetch_nothing_from_elsewhere(site):
    loading = re.compile(r"<(?:script|img|iframe)[^>]+src=\"?https?:|<link[^>]+stylesheet[^>]+https?:")
    for page in site.rglob("*.html"):
        assert not loading.search(page.read_text()), page.name
