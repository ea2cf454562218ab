"""Pages of the site that are generated: README, changelog, notebooks and the API reference."""

from __future__ import annotations

import ast
import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jupytext
from mkdocs.structure.files import File

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = PROJECT / "matlens"
NOTEBOOKS = PROJECT / "docs" / "notebooks"


class Face(NamedTuple):
    """The public names of a package, and its subpackages."""

    package: str
    sentence: str
    names: tuple[str, ...]
    homes: dict[str, str]  # name: the module that defines it
    packages: tuple[str, ...]


def read_face(package: str) -> Face:
    """Read a package's face from its stub, and its docstring."""
    folder = PACKAGE.joinpath(*package.split(".")[1:])
    if not folder.is_dir():
        sentence = ast.get_docstring(ast.parse(folder.with_suffix(".py").read_text())) or ""
        return Face(package, sentence, (), {}, ())
    sentence = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    homes, packages = {}, []
    for node in ast.parse((folder / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if node.module:
                    homes[alias.name] = f"{package}.{node.module}.{alias.name}"
                else:
                    packages.append(alias.name)
    names = sorted(homes, key=str.isupper)  # constants after what one calls
    return Face(package, sentence, tuple(names), homes, tuple(packages))


def api_pages() -> Iterator[tuple[str, str]]:
    """Yield the reference: the top-level names, then one page per package."""
    top = read_face("matlens")
    lines = ["# matlens", "", top.sentence, "", "```python sketch", "import matlens as ml", "```", ""]
    lines += ["| package | what it does |", "|---|---|"]
    faces = {package: read_face(f"matlens.{package}") for package in top.packages}
    for package, face in faces.items():
        lines.append(f"| [`matlens.{package}`]({package}.md) | {face.sentence.splitlines()[0]} |")
    lines += ["", *(reference(top.package, name) for name in top.names)]
    yield "api/index.md", "\n".join(lines)
    shown_at_top = set(top.homes.values())
    for package, face in faces.items():
        lines = [f"# matlens.{package}", "", face.sentence, ""]
        if face.names:
            elsewhere = [name for name in face.names if face.homes[name] in shown_at_top]
            if elsewhere:
                links = ", ".join(f"[`{name}`](index.md#matlens.{name})" for name in elsewhere)
                lines += [f"Also exported by `matlens`: {links}.", ""]
            lines += [reference(face.package, name) for name in face.names if name not in elsewhere]
        else:
            lines.append(f"::: matlens.{package}\n    options:\n      show_root_toc_entry: false\n")
        yield f"api/{package}.md", "\n".join(lines)


def reference(package: str, name: str) -> str:
    """Return the line that mkdocstrings replaces by the documentation of a name."""
    return f"::: {package}.{name}\n"


def root_page(name: str) -> str:
    """A Markdown file of the project's root, with links relative to docs."""
    text = re.sub(r"\]\(docs/", "](", (PROJECT / name).read_text())
    text = text.replace("](CONTRIBUTING.md)", "](contributing.md)")
    return re.sub(r"\[([^\]]+)\]\((analyses|benchmarks|results)\)", r"\1", text)


def notebook_page(path: Path) -> str:
    """Show a notebook as a page of prose and code."""
    notebook = jupytext.read(path)
    cells = [
        cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```"
        for cell in notebook.cells
    ]
    about = f"*Download as [{path.stem}.ipynb]({path.stem}.ipynb).*"
    title, *rest = cells
    return "\n\n".join([title, about, *rest]) + "\n"


def notebook_file(path: Path) -> str:
    """The notebook to download, with its pictures inside: Colab has no folder of images."""
    notebook = jupytext.read(path)
    for cell in notebook.cells:
        for name in re.findall(r"\(\.\./images/([\w.]+)\)", cell.source):
            picture = (PROJECT / "docs" / "images" / name).read_bytes()
            cell.setdefault("attachments", {})[name] = {"image/png": base64.b64encode(picture).decode()}
        cell.source = cell.source.replace("(../images/", "(attachment:")
    return jupytext.writes(notebook, fmt="ipynb")


def on_config(config: Any) -> Any:
    """Put the packages' pages into the navigation, as the last part of the reference."""
    api = config["nav"][-1]["Reference"][-1]["API"]
    api += [{package: f"api/{package}.md"} for package in read_face("matlens").packages]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    pages = {
        "index.md": root_page("README.md"), "changelog.md": root_page("CHANGELOG.md"),
        "contributing.md": root_page("CONTRIBUTING.md"),
    }  # fmt: skip
    pages |= dict(api_pages())
    for path in sorted(NOTEBOOKS.glob("*.py")):
        pages[f"notebooks/{path.stem}.md"] = notebook_page(path)
        pages[f"notebooks/{path.stem}.ipynb"] = notebook_file(path)
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Drop the test annotations of code fences."""
    return re.sub(r"^(```\w+) (?:sketch|real)$", r"\1", markdown, flags=re.MULTILINE)
