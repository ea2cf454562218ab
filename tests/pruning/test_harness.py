"""Models on tasks of lm-evaluation-harness: what is refused, what is asked, and how the answer is read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import pytest

from matlens import InputError, pruning

TASK = "task: colours\ndataset_path: json\noutput_type: multiple_choice\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "colours.yaml").write_text(TASK)
    return tmp_path


class Harness:
    """As much of the harness as is asked."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.template = "{{ text|shout }}"
        self.filled = ""
        self.templates = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        self.templates.filters["shout"] = str.upper

    def evaluate(self, **asked: Any) -> dict[str, Any]:
        self.asked = asked
        self.at, self.pools = Path.cwd(), "DISABLE_MULTIPROC" not in os.environ
        error: Any = 0.1 if asked["bootstrap_iters"] > 0 else "N/A"  # as the harness does, for any measure
        templates = sys.modules["lm_eval"].utils.env
        self.filled = templates.from_string(self.template).render(text="a\n")
        return {
            "results": {
                "colours": {
                    "alias": "colours", "acc,none": 0.75, "acc_stderr,none": error, "acc_norm,none": 0.5,
                    "acc_norm_stderr,none": "N/A", "exact_match,strict": 1.0,
                }
            },
            "n-samples": {"colours": {"original": 30, "effective": 20}},
        }  # fmt: skip


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    fake, package, tasks = Harness(), ModuleType("lm_eval"), ModuleType("lm_eval.tasks")
    package.__spec__ = ModuleSpec("lm_eval", None)

    class Manager:
        def __init__(self, include_path: str, include_defaults: bool) -> None:
            assert not include_defaults
            self.all_tasks = [path.stem for path in Path(include_path).glob("*.yaml")]

    utils = ModuleType("lm_eval.utils")
    utils.env = fake.templates  # type: ignore[attr-defined]
    vars(package)["simple_evaluate"], vars(tasks)["TaskManager"] = fake.evaluate, Manager
    vars(package)["utils"] = utils
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    return fake


def test_scores_are_read_with_their_intervals(
    folder: Path, harness: Harness, model_folder: Callable[[str], Path]
) -> None:
    table = pruning.task_scores(model_folder("llama"), ["colours"], folder, limit=20, seed=3)
    rows = table.set_index("metric")
    assert rows["value"].to_dict() == {"acc": 0.75, "acc_norm": 0.5, "exact_match (strict)": 1.0}
    assert rows.loc["acc", "low"] == pytest.approx(0.75 - 0.196)
    assert rows.loc["acc", "high"] == pytest.approx(0.75 + 0.196)
    assert rows["low"].isna().to_dict() == {"acc": False, "acc_norm": True, "exact_match (strict)": True}
    assert set(table["corpus"]) == {"colours"}
    assert set(table["n"]) == {20}
    assert harness.asked["model_args"]["pretrained"] == str(model_folder("llama"))
    assert harness.asked["model_args"]["trust_remote_code"] is False
    assert harness.at == folder  # where the data lie
    assert not harness.pools
    assert Path.cwd() != folder
    assert "DISABLE_MULTIPROC" not in os.environ
    assert harness.asked["limit"] == 20
    seeds = {name: value for name, value in harness.asked.items() if name.endswith("_seed")}
    assert seeds == dict.fromkeys(
        ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), 3
    )
    with pytest.raises(InputError, match="no task 'shapes'"):
        pruning.task_scores(model_folder("llama"), ["shapes"], folder)


def test_without_the_harness_it_is_refused_in_words(
    folder: Path, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"matlens\[tasks\]"):
        pruning.task_scores(model_folder("llama"), ["colours"], folder)


def test_what_would_run_code_or_is_not_there_is_refused(
    folder: Path, tmp_path: Path, model_folder: Callable[[str], Path], harness: Harness
) -> None:
    model = model_folder("llama")
    with pytest.raises(InputError, match="no folder"):
        pruning.task_scores(model, ["colours"], folder / "other")
    with pytest.raises(InputError, match="no model"):
        pruning.task_scores(folder, ["colours"], folder)
    with pytest.raises(InputError, match="no tasks"):
        pruning.task_scores(model, [], folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="no file of a task"):
        pruning.task_scores(model, ["colours"], empty)
    (folder / "deep.yaml").write_text(TASK + "x: " + "[" * 3000)
    with pytest.raises(InputError, match="cannot be read as YAML"):
        pruning.task_scores(model, ["colours"], folder)
    assert not harness.asked


@pytest.mark.parametrize(
    "line",
    [
        "doc_to_text: !function tools.text",
        "doc_to_text: !%66unction tools.text",
        "doc_to_text: [{deep: !!python/name:os.system }]",
        "'class': tools.Task",
        '{"cl\\x61ss": tools.Task}',
        "metric_list: [{metric: ./tools.py}]",
        "metric_list: [{metric: acc, hf_evaluate: true}]",
        "include: base.txt",
        "<<: {include: [base.txt]}",
        "include: ../other.yaml",
    ],
)
def test_code_is_found_however_it_is_written(
    line: str, folder: Path, tmp_path: Path, model_folder: Callable[[str], Path], harness: Harness
) -> None:
    inner = folder / "tasks"
    inner.mkdir()
    (inner / "base.txt").write_text("process_docs: !function tools.text\n")
    (folder / "other.yaml").write_text(TASK)
    plain = "" if line.startswith("{") else TASK
    (inner / "bad.yaml").write_text(f"{plain}{line}\n")
    with pytest.raises(InputError, match=r"runs code|lies outside"):
        pruning.task_scores(model_folder("llama"), ["colours"], inner)
    assert not harness.asked


def test_words_that_only_look_like_code_are_read(
    folder: Path, model_folder: Callable[[str], Path], harness: Harness
) -> None:
    more = "include: base.yaml\ndoc_to_text: 'The class: {{text}} !function'\nmetric_list: [{metric: acc}]\n"
    (folder / "colours.yaml").write_text(TASK + more)
    (folder / "base.yaml").write_text("include: colours.yaml\n")
    assert len(pruning.task_scores(model_folder("llama"), ["colours"], folder)) == 3
    assert harness.filled == "A\n"


def test_templates_reach_no_code(folder: Path, model_folder: Callable[[str], Path], harness: Harness) -> None:
    harness.template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(jinja2.exceptions.SecurityError):
        pruning.task_scores(model_folder("llama"), ["colours"], folder)
    assert not harness.filled
    assert sys.modules["lm_eval"].utils.env is harness.templates
