"""Mutation tests of the code that makes published numbers.

A sample of the mutants of each module (`mutating`) is run against the tests that cover it, each in a
process forked from one with the heavy packages loaded. Outcomes are stored in ``--out`` and reused while
the mutated function and, for survivors, its tests are unchanged; so a run resumes, also with a larger
``--sample``. Survivors are printed with their lines; the command fails unless ``mutants_explained.json``
says why they change no number. All faults of `named_faults` are tried.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from marked import table_lines, write_between
from mutating import Mutant, mutants
from named_faults import NAMED, faulty

ROOT = Path(__file__).resolve().parents[1]
EXPLAINED = Path(__file__).with_name("mutants_explained.json")
SMALLEST_LIMIT = 60.0  # CPU seconds always allowed to a mutant's tests
_PATIENCE = 20  # wall-clock factor on the limit, for mutants that sleep forever
# Modules, and the tests that cover them next to those of the module's name.
MORE_TESTS: dict[str, tuple[str, ...]] = {
    "metrics": ("warnings",),
    "linear/least_squares": ("linear/fitting", "linear/streaming", "lens/fitting", "parallel"),
    "linear/fitting": ("parallel", "dividing"),
    "linear/maps": (),
    "linear/mapsets": ("linear/maps", "linear/fitting", "io/artifact"),
    "activations/collecting": (),
    "models/readout": ("lens/fitting",),
    "activations/sinks": ("dividing",),
    "patching/schemes": ("patching/contexts",),
    "patching/submodules": ("patching/replacements",),
    "patching/variants": (),
    "lens/evaluation": ("warnings",),
    "lens/early_exit": ("lens/evaluation",),
    "paper_a/predictions": ("analyses/paper_a",),
    "lens/maps": ("lens/lens", "lens/fitting"),
    "lens/closed_forms": ("lens/fitting", "dividing"),
    "lens/trained": ("lens/fitting", "lens/lens", "dividing"),
    "lens/comparison": ("lens/evaluation", "lens/fitting", "warnings"),
    "lens/open_sets": ("lens/evaluation",),
    "models/families/falcon": ("models/bridging",),
    "models/changes": (),
    "paper_a/submodules": ("analyses/paper_a",),
    "paper_a_fig6_alternation": ("analyses/paper_a",),
    "paper_a/schemes": (),
    "paper_a_sec5_corpora": ("analyses/paper_a",),
    "all_positions": ("analyses/paper_a",),
    "sample_sizes": ("analyses/paper_a",),
    "attention_heads": ("analyses/beside_paper_a",),
    "memory_and_layers": ("analyses/beside_paper_a",),
    "ffn/projection": ("ffn/values",),
    "ffn/updates": ("ffn/values",),
    "ffn/values": ("models/mixtures",),
    "ffn/trace": (),
    "ffn/events": ("ffn/trace",),
    "ffn/clusters": (),
    "ffn/rule": ("ffn/trace", "analyses/exits"),
    "ffn/control": (),
    "ffn/perplexity": ("ffn/control",),
    "pruning/folding": ("pruning/pruned",),
    "pruning/choosing": ("pruning/evaluation", "pruning/pruned"),
    "pruning/pruned": (),
    "pruning/layouts": ("pruning/evaluation", "pruning/pruned"),
    "pruning/evaluation": ("pruning/pruned",),
    "pruning": ("pruning/evaluation",),
    "cuts/maps": ("pruning/cuts",),
    "cuts/continuations": ("pruning/cuts",),
    "linearity/scores": ("linearity/atlas",),
    "linearity/parts": ("linearity/atlas",),
    "linearity/atlas": (),
    "linearity/ranking": ("linearity/atlas",),
    "sinks": ("analyses/paper_a",),
    "plausibility": ("analyses/paper_a",),
    "control/baselines": ("analyses/control",),
    "control/comparison": ("analyses/control",),
    "control/selection": ("analyses/control",),
    "exits/classifiers": ("analyses/exits",),
    "exits/comparison": ("analyses/exits",),
    "exits/outcomes": ("analyses/exits",),
    "paper_b_fig6_dominance": ("ffn/values",),
    "sub_updates/events": ("ffn/trace",),
    "sub_updates/extremes": ("ffn/clusters",),
    "paper_b_fig4_overlap": ("analyses/overlap", "analyses/paper_b"),
    "paper_b_removal": ("analyses/removal_table",),
    "study/steps": ("study/study", "linear/streaming"),
}


def tests_of(module: str) -> list[str]:
    """Test files of a module: those of its name, if there are any, and those listed."""
    *package, name = module.split("/")
    named = ["/".join([*package[:1], name])]
    if (ROOT / "analyses" / f"{module}.py").is_file():
        named.append(f"analyses/{name}")
    named = [each for each in named if (ROOT / path_of_test(each)).is_file()]
    return list(map(path_of_test, dict.fromkeys([*named, *MORE_TESTS[module]])))


def path_of_test(name: str) -> str:
    """The path of ``linear/maps`` is ``tests/linear/test_maps.py``."""
    folder, slash, file = name.rpartition("/")
    return f"tests/{folder}{slash}test_{file}.py"


def main(
    sample: Annotated[int, typer.Option(min=0, help="Mutants of each module; 0: named faults alone.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="A module, such as lens/quality.")] = None,
    out: Annotated[Path, typer.Option(help="Where results are kept.")] = ROOT / "out" / "mutants",
    report: Annotated[bool, typer.Option("--report", help="Run nothing; print what is there.")] = False,
    seconds: Annotated[float, typer.Option(help="Begin no mutant after so many seconds.")] = math.inf,
    page: Annotated[
        Path | None, typer.Option(help="A page whose table, between two marks, is written anew.")
    ] = None,
) -> None:
    """Try a sample of the mutants of every module, and print which live."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the tests under way are ended too
    out, page = out.resolve(), page and page.resolve()
    os.chdir(ROOT)
    out.mkdir(parents=True, exist_ok=True)
    modules = only or list(MORE_TESTS)
    named = [(fault, faulty(fault, path_of(fault.module).read_text())) for fault in NAMED]
    results = Results(out / "results.jsonl")
    if not report:
        end = time.monotonic() + seconds
        load_heavy_packages()
        for module in modules:
            of_module = [mutant for fault, mutant in named if fault.module == module]
            run_module(module, [*of_module, *draw(module, sample, seed)], results, end)
    tried = outcomes_of(modules, sample, seed, results)
    alive = tried[tried["outcome"] == "lives"].to_dict("records")
    print(pd.DataFrame(count(tried)).to_string(index=False, header=False))
    for row in alive:
        print(f"{row['module']}:{row['line']}  {row['key']}\n    {row['reason'] or 'UNEXPLAINED'}")
    of_named = [
        (fault.name, f"`{fault.module}`", results.outcome(fault.module, mutant) or "not tried")
        for fault, mutant in named
    ]
    print(*map("  ".join, of_named), sep="\n")
    if page is not None:
        head, *_, total = (row[:3] + row[-1:] for row in count(tried))
        seen = sum(outcome == "killed" for *_, outcome in of_named)
        rows = [head, ("named faults", len(of_named), seen, 0), total]
        write_between(page, "mutants", "\n".join(table_lines(rows)))
    unseen = any(outcome == "lives" for *_, outcome in of_named)
    unexplained = (tried["outcome"] == "untried").any() or not all(row["reason"] for row in alive)
    raise typer.Exit(1 if unseen or unexplained else 0)


def outcomes_of(modules: Sequence[str], sample: int, seed: int, results: Results) -> pd.DataFrame:
    """One row per mutant, with its outcome, and the explanation of a survivor."""
    reasons = explanations()
    rows = [
        (
            module, mutant.line, mutant.key, results.outcome(module, mutant) or "untried",
            reasons.get(module, {}).get(mutant.key, ""),
        )
        for module in modules for mutant in drawn_or_tried(module, sample, seed, results)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["module", "line", "key", "outcome", "reason"])


def count(outcomes: pd.DataFrame) -> list[tuple[Any, ...]]:
    """Rows of a table: one for each tried module, and one for all."""
    tried = outcomes[outcomes["outcome"] != "untried"]
    lines: list[tuple[Any, ...]] = [("module", "tried", "killed", "timeout", "lives", "explained")]
    for module, part in [*tried.groupby("module", sort=False), ("all", tried)]:
        counts = [int((part["outcome"] == outcome).sum()) for outcome in ("killed", "timeout", "lives")]
        explained = int(((part["outcome"] == "lives") & (part["reason"] != "")).sum())
        lines.append((module, len(part), *counts, explained))
    return lines


def path_of(module: str) -> Path:
    """The file of a module."""
    paths = (ROOT / folder / f"{module}.py" for folder in ("matlens", "analyses"))
    return next(path for path in paths if path.is_file())


def draw(module: str, sample: int, seed: int) -> list[Mutant]:
    """A random sample of a module's mutants; larger samples contain the smaller ones."""
    every = mutants(path_of(module).read_text())
    return sorted(every, key=lambda mutant: digest(f"{seed} {module} {mutant.key}"))[:sample]


def drawn_or_tried(module: str, sample: int, seed: int, results: Results) -> list[Mutant]:
    """The sample, and all others with an outcome of an earlier one."""
    every = mutants(path_of(module).read_text())
    drawn = {mutant.key for mutant in draw(module, sample, seed)}
    return [mutant for mutant in every if mutant.key in drawn or results.outcome(module, mutant)]


class Results:
    """Outcomes of mutants by module and key, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self.path, self._known = path, dict[tuple[str, str], dict[str, Any]]()
        for line in path.read_text().splitlines() if path.is_file() else ():
            row = json.loads(line)
            self._known[row["module"], row["key"]] = row

    def outcome(self, module: str, mutant: Mutant) -> str | None:
        """``killed``, ``timeout`` or ``lives``, if known; of those that live, by these very tests."""
        row = self._known.get((module, mutant.key))
        if row is None or row["source"] != digest(mutant.part):
            return None
        return row["outcome"] if row["outcome"] != "lives" or row["tests"] == tests_digest(module) else None

    def seconds(self, module: str, mutant: Mutant) -> float:
        """CPU seconds of a mutant's tests."""
        return float(self._known.get((module, mutant.key), {"seconds": 0})["seconds"])

    def add(self, module: str, mutant: Mutant, outcome: str, seconds: float) -> None:
        """Store the outcome of a mutant."""
        row = {
            "module": module, "key": mutant.key, "line": mutant.line, "outcome": outcome,
            "seconds": round(seconds, 1), "source": digest(mutant.part), "tests": tests_digest(module),
        }  # fmt: skip
        self._known[module, mutant.key] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def digest(text: str) -> str:
    """A hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tests_digest(module: str) -> str:
    """A hash of a module's tests."""
    return digest("".join((ROOT / path).read_text() for path in tests_of(module)))


def load_heavy_packages() -> None:
    """Import heavy packages once; each run imports the tested package itself."""
    import pandas  # noqa: F401
    import pytest  # noqa: F401
    import sklearn.linear_model
    import sklearn.metrics  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)


def run_module(module: str, drawn: Sequence[Mutant], results: Results, end: float) -> None:
    """Run a module's mutants without an outcome, after its tests on the original."""
    unknown = [mutant for mutant in drawn if results.outcome(module, mutant) is None]
    tests, whole = tests_of(module), _as_it_is(module)
    if unknown and time.monotonic() < end and results.outcome(module, whole) is None:
        _run_one(module, whole, tests, 600, results)
    if unknown and results.outcome(module, whole) not in ("lives", None):
        raise SystemExit(f"{module} as it is does not pass its tests, {', '.join(tests)}.")
    limit = max(SMALLEST_LIMIT, 4 * results.seconds(module, whole))
    for mutant in unknown:
        if time.monotonic() < end:
            _run_one(module, mutant, tests, limit, results)


def _as_it_is(module: str) -> Mutant:
    text = path_of(module).read_text()
    return Mutant(0, "as it is", text, text)


def _run_one(module: str, mutant: Mutant, tests: Sequence[str], limit: float, results: Results) -> None:
    outcome, seconds = run_tests(module, mutant.source, tests, limit)
    results.add(module, mutant, outcome, seconds)
    print(f"{outcome:8} {seconds:5.1f} s  {module}:{mutant.line}  {mutant.key}", flush=True)


def run_tests(module: str, source: str, tests: Sequence[str], limit: float) -> tuple[str, float]:
    """Run tests in a forked process with a mutated source of a module.

    Parameters
    ----------
    limit
        CPU seconds that they may take.

    Returns
    -------
        ``killed``, ``lives`` or ``timeout``, and the CPU seconds.
    """
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            _limit_processor_time(limit)
            code = _tests_in_this_process(module, source, tests)
        finally:
            os._exit(code)
    deadline = time.monotonic() + _PATIENCE * limit
    ended = 0
    try:
        while not ended and time.monotonic() < deadline:
            time.sleep(0.05)
            ended, status, usage = os.wait4(child, os.WNOHANG)
    finally:
        if not ended:
            os.killpg(child, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
    return ("timeout" if not ended else _outcome(status)), usage.ru_utime + usage.ru_stime


def _limit_processor_time(limit: float) -> None:
    soft = math.ceil(limit)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 5))


def _outcome(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout"
    return "lives" if code == 0 else "killed"


def _tests_in_this_process(module: str, source: str, tests: Sequence[str]) -> int:
    import importlib.machinery

    import pytest

    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    sys.path.insert(0, str(ROOT))
    path, loader = str(path_of(module)), importlib.machinery.SourceFileLoader
    read, stat = loader.get_data, loader.path_stats

    def get_data(self: Any, name: str) -> bytes:
        return source.encode() if name == path else read(self, name)

    def path_stats(self: Any, name: str) -> Any:
        if name == path:
            raise OSError("what is compiled of the file is not what is tested")
        return stat(self, name)

    loader.get_data = get_data  # type: ignore[method-assign, assignment]
    loader.path_stats = path_stats  # type: ignore[method-assign, assignment]
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=no"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *tests]))


def explanations() -> dict[str, dict[str, str]]:
    """Why mutants that live change no number: by module and key."""
    return dict(json.loads(EXPLAINED.read_text())) if EXPLAINED.is_file() else {}


if __name__ == "__main__":
    typer.run(main)
