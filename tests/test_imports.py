"""Modules depend on each other one way only, and what has one home stays there."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import matlens

ROOT = Path(matlens.__file__).parent
PATHS = {path.relative_to(ROOT).with_suffix(""): path for path in sorted(ROOT.rglob("*.py"))}
FILES = {".".join(name.parts): path for name, path in PATHS.items()}
MODULES = sorted(set(FILES) - {"__init__"})

# Three chains that do not know each other, and then what puts them together; a module may import
# modules of the groups before its own. A new module has to be given its place here.
FIRST = ("errors", "version")
MATHEMATICS = (FIRST, ("metrics", "artifacts"), ("maps", "storage"), ("moments",), ("fitting",))
MODEL = (FIRST, ("sites",), ("wiring",), ("models",))
TEXT = (FIRST, ("samples",), ("sources",), ("corpora",))
TOGETHER = (
    ("readout", "examples", "provenance", "replacements"), ("patching",), ("activations", "schemes"),
    ("collecting",),
    ("sinks", "submodules", "substitutes", "evaluation", "tokens"), ("exits", "plausibility"), ("plots",),
    (
        "ffn.__init__", "ffn.values", "ffn.plots", "ffn.event_plots", "ffn.exit_plots", "ffn.cluster_plots",
        "ffn.control_plots", "ffn.commonness", "ffn.usage", "ffn.sheets", "ffn.attributes", "ffn.prompts",
    ),
    ("ffn.words",), ("ffn.projection",),
    ("ffn.overlap", "ffn.updates", "ffn.patterns", "ffn.agglomeration"), ("ffn.concepts", "ffn.trace"),
    ("ffn.scores",), ("ffn.events", "ffn.clusters"), ("ffn.extremes", "ffn.exits"),
    ("ffn.groups", "ffn.classifiers"), ("ffn.comparison",),
    ("ffn.control", "ffn.choosing", "ffn.baselines", "ffn.perspective"),
    ("ffn.generation", "ffn.perplexity", "ffn.graders"), ("ffn.toxicity",),
    ("workflow",), ("study",), ("ffn.studies",), ("options",), ("ffn.terminal",),
    ("ffn.update_command", "ffn.cluster_command"), ("ffn.commands",), ("cli",), ("scripts",),
)  # fmt: skip


def allowed() -> dict[str, set[str]]:
    """What each module may import."""
    below: dict[str, set[str]] = {}
    for chain in (MATHEMATICS, MODEL, TEXT):
        seen: set[str] = set()
        for group in chain:
            below |= {module: set(seen) for module in group}
            seen |= set(group)
    seen = set(below)
    for group in TOGETHER:
        below |= {module: set(seen) for module in group}
        seen |= set(group)
    return below


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports: at its top, in functions and for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(tree: ast.AST) -> set[str]:
    """Modules of matlens that a module imports."""
    found = set()
    for name in imported(tree):
        package, _, rest = name.partition(".")
        if package == "matlens":
            parts = rest.split(".")
            names = {".".join(parts[:i]) for i in range(1, len(parts) + 1)} & set(FILES)
            found.add(max(names, key=len, default="__init__"))
    return found


GRAPH = {module: own(ast.parse(FILES[module].read_text())) for module in MODULES}


def closure(module: str) -> set[str]:
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        new = GRAPH[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from matlens.maps import MapSet", {"maps"}),
        ("from matlens import metrics, provenance as p", {"metrics", "provenance"}),
        ("import matlens.plots as p", {"plots"}),
        ("def f():\n    from matlens.cli import app", {"cli"}),
        ("if TYPE_CHECKING:\n    from matlens.sites import Site", {"sites"}),
        ("import matlens", {"__init__"}),
        ("from matlens import MapSet", {"__init__"}),
        ("import torch\nfrom safetensors.torch import save", set()),
    ],
)
def test_imports_are_found_wherever_they_are_written(code: str, expected: set[str]) -> None:
    assert own(ast.parse(code)) == expected


def test_every_module_has_a_place_in_the_order() -> None:
    placed = sorted(allowed())
    assert placed == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_comes_before_it(module: str) -> None:
    assert GRAPH[module] <= allowed().get(module, set())


def test_imports_run_in_no_circle() -> None:
    order = list(TopologicalSorter(GRAPH).static_order())
    assert sorted(order) == MODULES
    assert sum(map(len, GRAPH.values())) > len(MODULES), "the graph is nearly empty, so this proves nothing"


@pytest.mark.parametrize("module", ["metrics", "artifacts", "maps", "moments", "fitting"])
def test_mathematics_needs_no_language_model(module: str) -> None:
    for name in (module, *closure(module)):
        packages = {found.split(".")[0] for found in imported(ast.parse(FILES[name].read_text()))}
        foreign = packages - set(sys.stdlib_module_names) - {"matlens"}
        assert foreign <= {"torch", "numpy", "scipy", "jaxtyping", "safetensors"}, name


@pytest.mark.parametrize(
    ("modules", "expected"),
    [("matlens", []), ("matlens.fitting, matlens.maps, matlens.metrics", ["torch"])],
)
def test_importing_loads_no_more_than_is_needed(modules: str, expected: list[str]) -> None:
    heavy = ("torch", "transformer_lens", "transformers")
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(expected)


def strings(tree: ast.Module) -> Iterator[str]:
    """Every string that is not a docstring, those inside f-strings included."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_names_of_hooks_are_written_in_sites_alone() -> None:
    hook = re.compile(r"\bhook_\w|\bblocks\.")
    homes = {
        name for name, path in FILES.items() if any(map(hook.search, strings(ast.parse(path.read_text()))))
    }
    assert homes == {"sites"}


def test_what_is_public_is_what_type_checkers_see_and_comes_from_there() -> None:
    assert matlens.__all__ == sorted(matlens.__all__)
    assert sorted(dir(matlens)) == matlens.__all__
    tree = ast.parse(FILES["__init__"].read_text())
    homes = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("matlens.")
        for alias in node.names
    }
    assert sorted(homes) == matlens.__all__
    for name, home in homes.items():
        assert getattr(matlens, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        matlens.nothing  # noqa: B018
