"""A folder of a model, whole or pruned, on the tasks of lm-evaluation-harness, from files of one's own."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from matlens.errors import InputError, PositiveInt, Seed, checked, printable, short
from matlens.io.files import system_errors
from matlens.io.tables import result_row, result_table
from matlens.metrics import Estimate

TASKS = "tasks"  # the experiment
_PLAIN = {"map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge"}  # tags of plain values
_RUNNING = ("class", "use_prompt", "hf_evaluate")  # keys that name code, or files that may
_LONGEST = 1 << 20  # bytes of a task file
_DRAWS = 1000  # of a bootstrap, where a standard error has no formula; without it the harness gives none
_NORMAL = 1.96  # standard errors on each side of a 95% interval


@checked
def task_scores(
    model: str | Path,
    tasks: Sequence[str],
    folder: str | Path,
    *,
    limit: PositiveInt | None = None,
    batch_size: PositiveInt = 8,
    seed: Seed = 0,
    device: str = "cpu",
) -> pd.DataFrame:
    """Scores of a model on tasks whose files lie in a folder; no code of tasks is run.

    A row for each task and measure, such as ``acc``, with the interval that the harness's standard error
    gives.

    Parameters
    ----------
    model
        A Hugging Face folder, such as `matlens.pruning.save_pruned` writes.
    tasks
        Names of tasks that the folder's files define.
    folder
        Files of tasks, as lm-evaluation-harness reads them (``task.yaml``), with the data next to them: the
        paths of data in these files begin in this folder.
    limit
        Read no more than so many items of each task.
    batch_size
        Items that are read at once.
    seed
        Seed of the harness.
    device
        Where the model runs.

    Raises
    ------
    InputError
        lm-evaluation-harness is not installed, there is no such folder or task, or a task would run code.
    """
    if not tasks:
        raise InputError("There are no tasks. Expected the name of one or more.")
    model, folder = (Path(each).expanduser().absolute() for each in (model, folder))
    if not (model / "config.json").is_file():
        raise InputError(f"There is no model in {short(str(model))}. Expected a Hugging Face folder.")
    _check_no_code(folder)
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(
            "lm-evaluation-harness is not installed. Install it with pip install 'matlens[tasks]'."
        )
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        there = ", ".join(map(str, manager.all_tasks[:6])) or "none"
        raise InputError(f"There is no task {short(unknown[0])} in {folder}. It has {there}.")
    with chdir(folder), _confined_templates(), _alone():
        outcome = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(model), "dtype": "auto", "trust_remote_code": False},
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            batch_size=batch_size,
            device=device,
            log_samples=False,
            bootstrap_iters=_DRAWS,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    return result_table(_rows(outcome, model.name))


@contextmanager
def _alone() -> Iterator[None]:
    """Standard errors are worked out here, and not by a process for each core."""
    name = "DISABLE_MULTIPROC"
    before = os.environ.copy()
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ.update(before)


@contextmanager
def _confined_templates() -> Iterator[None]:
    """Templates of tasks are filled in by Jinja's sandbox, from which no code can be reached."""
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    own = getattr(utils, "env", None)
    if not isinstance(own, jinja2.Environment):
        raise InputError(
            "This version of lm-evaluation-harness fills in templates in a way that is not known here. "
            "Install another: pip install 'matlens[tasks]'."
        )
    confined = SandboxedEnvironment(
        loader=own.loader, undefined=own.undefined, keep_trailing_newline=own.keep_trailing_newline
    )
    confined.filters.update(own.filters)
    utils.env = confined
    try:
        yield
    finally:
        utils.env = own


def _check_no_code(folder: Path) -> None:
    """Refuse files of tasks that name code, and what they include too."""
    if not folder.is_dir():
        raise InputError(f"There is no folder {short(str(folder))}. Expected one with files of tasks.")
    files = sorted(path for kind in ("*.yaml", "*.yml") for path in folder.rglob(kind))
    if not files:
        raise InputError(f"There is no file of a task in {folder}. Expected one such as mine.yaml.")
    seen: set[Path] = set()
    while files:
        path = files.pop()
        whole = path.resolve()
        if not whole.is_relative_to(folder.resolve()):
            raise InputError(f"{path} lies outside of {folder}. Expected files of tasks within it.")
        if whole not in seen:
            seen.add(whole)
            files += [path.parent / included for included in _included(path)]


def _included(path: Path) -> list[str]:
    """Which files a file of a task includes, if it holds plain values alone."""
    import yaml

    with system_errors(path):
        if path.stat().st_size > _LONGEST:
            raise InputError(f"{path} is longer than a file of a task can be.")
        content = path.read_bytes()
    try:
        root = yaml.compose(content, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeError, RecursionError) as error:
        reason = printable(" ".join(str(error).split()), most=200)
        raise InputError(f"{path} is no file of a task: it cannot be read as YAML ({reason}).") from error
    included: list[str] = []
    nodes, seen = [root] if root is not None else [], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        runs = node.tag if node.tag.removeprefix("tag:yaml.org,2002:") not in _PLAIN else None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                nodes += [key, value]
                runs = key.value if key.value in _RUNNING else runs
                if key.value == "metric" and not str(value.value).isidentifier():
                    runs = f"metric: {value.value}"
                if key.value == "include":
                    listed = value.value if isinstance(value, yaml.SequenceNode) else [value]
                    included += [str(item.value) for item in listed]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
        if runs is not None:
            raise InputError(
                f"{path} runs code of its own ({printable(str(runs), most=60)}). Expected a task of "
                "templates alone."
            )
    return included


def _rows(outcome: Mapping[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """A row a measure: the harness calls one ``acc,none``, and its standard error ``acc_stderr,none``."""
    rows = []
    for task, values in (outcome or {}).get("results", {}).items():
        n = int((outcome or {}).get("n-samples", {}).get(task, {}).get("effective", 0))
        for key, value in values.items():
            metric, _, kept = str(key).partition(",")
            if not kept or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{kept}")
            half = _NORMAL * error if isinstance(error, int | float) else float("nan")
            label = metric if kept == "none" else f"{metric} ({kept})"
            rows.append(
                result_row(
                    TASKS, model=name, corpus=str(task), method="", layer=None, target=None, metric=label,
                    estimate=Estimate(float(value), value - half, value + half, n),
                )
            )  # fmt: skip
    if not rows:
        raise InputError("The harness gave no score. Expected a task with a measure.")
    return rows
