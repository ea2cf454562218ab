"""Rooms import one way only, each has one public face, and what has one home stays there."""

from __future__ import annotations

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
PROJECT = ROOT.parent
TESTS = Path(__file__).parent

# Packages in import order: each imports from those before it and from itself.
FLOORS = (
    "errors", "parallel", "numerics", "metrics", "io", "models", "data", "activations",
    "linear", "patching", "drawing", "plots", "lens", "ffn", "linearity", "pruning", "study", "explorer",
    "cli", "__main__",
)  # fmt: skip
ROOMS = tuple(floor for floor in FLOORS if (ROOT / floor).is_dir())
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__init__.py"
}


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports: at its top, in functions and for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_of_matlens(tree: ast.AST) -> set[str]:
    """Modules of the package that a module imports; a name of a room's face stands for the room."""
    reached = set()
    for name in imported(tree):
        package, _, rest = name.partition(".")
        if package == "matlens":
            parts = rest.split(".")
            names = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
            reached.add(next((name for name in names if name in MODULES or name in ROOMS), ""))
    return reached


GRAPH = {module: modules_of_matlens(ast.parse(path.read_text())) for module, path in MODULES.items()}


def floor_of(module: str) -> int:
    return FLOORS.index(module.partition(".")[0])


def test_every_module_lives_in_a_room():
    assert {module.partition(".")[0] for module in MODULES} <= set(FLOORS)
    assert {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(
        ROOMS
    )


def test_a_room_imports_only_from_rooms_on_floors_below():
    for module, path in MODULES.items():
        for other in GRAPH[module] - {""}:
            assert floor_of(other) <= floor_of(module), f"{module} imports {other}"
            assert other not in ROOMS or floor_of(other) < floor_of(module), (
                f"{module} imports its own room's face"
            )
        names = {name for name in imported(ast.parse(path.read_text())) if name.count(".") == 1}
        outside = {name for name in names if name.startswith("matlens.")} - {"matlens.__version__"}
        assert {name.removeprefix("matlens.") for name in outside} <= set(FLOORS)


def test_imports_run_in_no_circle():
    inside = {module: others & set(MODULES) for module, others in GRAPH.items()}
    assert set(TopologicalSorter(inside).static_order()) == set(MODULES)
    assert sum(map(len, inside.values())) > len(MODULES), "the graph is nearly empty, so this proves nothing"


POSIX_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
POSIX_NAMES = {
    "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "fork", "geteuid", "getuid", "killpg", "mkfifo",
    "sched_getaffinity", "setsid", "statvfs", "sysconf",
}  # fmt: skip


def test_nothing_needs_a_posix_system():
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        assert not {name.partition(".")[0] for name in imported(tree)} & POSIX_MODULES, module
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        assert not {node.attr for node in nodes if ast.unparse(node.value) == "os"} & POSIX_NAMES, module


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ("matlens, matlens.cli.app", []),
        ("matlens.linear.fitting, matlens.linear.maps, matlens.metrics", ["torch"]),
    ],
)
def test_importing_loads_no_more_than_is_needed(modules, expected):
    heavy = ("torch", "transformer_lens", "transformers", "datasets", "sklearn", "pandas", "matplotlib")
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


def test_names_of_hooks_are_written_in_sites_alone():
    hook = re.compile(r"\bhook_\w|\bblocks\.")
    homes = {
        name for name, path in MODULES.items() if any(map(hook.search, strings(ast.parse(path.read_text()))))
    }
    assert homes == {"models.sites"}


def face_of(package: str) -> dict[str, str]:
    """Public names of a package by where they come from, as its stub lists them."""
    stub = ROOT.joinpath(*package.split(".")[1:], "__init__.pyi")
    if not stub.exists():  # a module on a floor of its own, whose names are all its own
        return dict.fromkeys(vars(importlib.import_module(package)), package)
    homes = {}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 1
            for alias in node.names:
                assert alias.asname == alias.name, "a stub exports only what is named again"
                homes[alias.name] = f"{package}.{node.module}" if node.module else package
    return homes


@pytest.mark.parametrize("package", ["matlens", *(f"matlens.{room}" for room in ROOMS)])
def test_a_face_exports_what_its_stub_lists(package):
    module, homes = importlib.import_module(package), face_of(package)
    assert set(module.__all__) == set(homes)
    for name, home in homes.items():
        there = importlib.import_module(home)
        assert getattr(module, name) is getattr(there, name), name
        assert home == package or name != home.rpartition(".")[2], f"{name} hides the module of its name"
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018


def test_the_top_has_at_most_sixty_names():
    assert len([name for name, home in face_of("matlens").items() if home != "matlens"]) <= 60


def test_folders_of_tests_are_rooms_and_no_test_is_imported_by_another():
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and any(path.glob("test_*.py"))}
    assert folders - {"analyses", "documentation"} == set(ROOMS)
    for path in TESTS.rglob("*.py"):
        modules = {name.rpartition(".")[0] for name in imported(ast.parse(path.read_text()))}
        assert not [name for name in modules if name.rpartition(".")[2].startswith("test_")], path.name


# Modules of the command line that scripts share; what makes WikiLM; and how many steps a lens is trained for.
OWN_MODULES = {"matlens.cli": {"options", "printing", "starting"}, "matlens.lens": {"evaluation", "trained"}}
MAKERS = ("training/wikilm.py", "lenses/__init__.py")


def test_users_import_from_rooms():
    users = [*(PROJECT / "benchmarks").glob("*.py"), *(PROJECT / "analyses").rglob("*.py")]
    paths = [path for path in users if not path.as_posix().endswith(MAKERS)]
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("matlens"):
            assert node.module.count(".") <= 1, f"{node.module} is a third level"
            names = {alias.name for alias in node.names}
            modules = OWN_MODULES.get(node.module, set())
            assert names <= set(face_of(node.module)) | modules
