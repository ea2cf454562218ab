"""A folder of a model, whole or pruned, on the tasks of lm-evaluation-harness, from files of one's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from matlens.arguments import require_whole, short
from matlens.errors import InputError
from matlens.metrics import Estimate
from matlens.signatures import checked
from matlens.storage.files import system_errors
from matlens.storage.tables import result_row, result_table

TASKS = "tasks"  # the experiment
_CODE = "!function"  # of a task file, runs a function of a file beside it
_DRAWS = (
    1000  # of a bootstrap, where a standard error has no formula; without it the harness gives none at all
)
_LONGEST = 1 << 20  # bytes of a task file
_NORMAL = 1.96  # standard errors on each side of a 95% interval


@checked
def task_scores(
    model: str | Path,
    tasks: Sequence[str],
    folder: str | Path,
    *,
    limit: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
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
        Files of tasks, as lm-evaluation-harness reads them (``task.yaml``), with the data beside them.
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
        lm-evaluation-harness is not installed; there is no such folder or task; or a task would run code.
    """
    if not tasks:
        raise InputError("There are no tasks. Expected the name of one or more.")
    limit = None if limit is None else require_whole(limit, "limit", least=1)
    require_whole(batch_size, "batch_size", least=1)
    model, folder = Path(model).expanduser(), Path(folder).expanduser()
    if not (model / "config.json").is_file():
        raise InputError(f"There is no model in {short(str(model))}. Expected a Hugging Face folder.")
    _require_no_code(folder)
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
    outcome = simple_evaluate(
        model="hf", model_args={"pretrained": str(model), "dtype": "auto", "trust_remote_code": False},
        tasks=list(tasks), task_manager=manager, limit=limit, batch_size=batch_size, device=device,
        random_seed=seed, numpy_random_seed=seed, torch_random_seed=seed, fewshot_random_seed=seed,
        log_samples=False, bootstrap_iters=_DRAWS,
    )  # fmt: skip
    return result_table(_rows(outcome, model.name))


def _require_no_code(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"There is no folder {short(str(folder))}. Expected one with files of tasks.")
    files = sorted(path for kind in ("*.yaml", "*.yml") for path in folder.rglob(kind))
    if not files:
        raise InputError(f"There is no file of a task in {folder}. Expected one such as mine.yaml.")
    for path in files:
        with system_errors(path):
            if path.stat().st_size > _LONGEST:
                raise InputError(f"{path} is longer than a file of a task can be.")
            text = path.read_text(encoding="utf-8", errors="replace")
        if _CODE in text or "class:" in text:
            raise InputError(
                f"{path} runs code of its own ({_CODE} or class:). Expected a task of templates alone."
            )


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
