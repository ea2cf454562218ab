"""Every public name of the Python API that takes something from a user."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import matlens
from attack.targets_comparing import COMPARING
from attack.targets_first import FIRST
from attack.targets_reading import READING
from attack.targets_seeing import SEEING

TARGETS = [*FIRST, *READING, *COMPARING, *SEEING]

# What takes nothing from a user, or is made by the library alone; and where it is tried instead.
EXEMPT = {
    "InputError": "an error",
    "models.Family": "made by the library",
    "models.block_hook": "a name",
    "models.require_finite": "a check of the library's own",
    "models.smollm2_path": "takes nothing",
    "activations.SinkWarning": "a warning",
    "annotation.WordNet": "takes nothing",
    "cli.main": "takes a command line, which commands.py tries",
    "cli.run_study": "takes an analysis, which is no user's input",
    "cli.LinkageChoice": "an option",
    "control.Grader": "a protocol",
    "control.Detoxify": "takes nothing",
    "control.ProfanityCheck": "takes nothing",
    "models.describe_changes": "words of what changes_of gives",
    "storage.number_text": "words of numbers that the library has computed",
    "linearity.submodule_positions": "what linearity.submodule_layers tries, at other places",
    **dict.fromkeys(
        (f"lens.head_{name}" for name in ("ablation", "pairs", "r2", "replacements")),
        "what the analysis of heads computes of maps, samples and replacements that are tried by themselves",
    ),
    "plots.by_fitting": "draws what tables of analyses hold",
    "plots.concept_shares": "draws what tables of analyses hold",
    "linear.PairMoments": "what linear.fit_stream and activations.stream_moments call",
    "activations.StoredMoments": "what activations.stream_moments gives, of any number of folders",
    "activations.merge_moments": "what matlens merge calls",
    "activations.read_exported": "a folder of another program, whose faults its tests try",
    "processes.Processes": "made by processes.joined",
    "processes.ProcessLost": "an error",
    "processes.alone": "takes nothing",
    "processes.current": "takes nothing",
    "processes.joined": "takes what torchrun says",
    "processes.started_by_many": "takes nothing",
    "linear.arrays_of": "what linear.convert_published calls",
    "linear.read_pickle": "what linear.convert_published calls",
    "linear.write_maps": "what MapSet.save and fit_maps call",
    "patching.remove_sub_updates": "what ffn.removal_table calls",
    "plots.costs_figure": "draws what tables of analyses hold",
    "plots.attention_heads": "draws what tables of analyses hold",
    "plots.exits_figure": "draws what tables of analyses hold",
    "plots.extremes_figure": "draws what tables of analyses hold",
    "plots.removal_figure": "draws what tables of analyses hold",
    "plots.pattern_sizes": "draws what tables of analyses hold",
    "plots.shares_by_layer": "draws what tables of analyses hold",
    # The library's own writers and readers: what users pass through them is tried by what calls them, and
    # what lies in the files by mutations.
    **dict.fromkeys(
        (
            f"storage.{name}"
            for name in (
                "require_writable",
                "system_errors",
                "to_json",
                "write_bytes",
                "write_json",
                "write_text",
                "write_together",
                "Workplace",
                "command_line",
                "make_config",
                "software_versions",
                "RowFiles",
                "keep_rows",
                "read_rows",
                "csv_text",
                "result_row",
                "result_table",
                "write_results",
            )
        ),
        "called by the library alone",
    ),
}


def untried() -> Iterator[str]:
    """Public functions and classes that no target calls, and that nothing is known to excuse."""
    tried = {target.name for target in TARGETS}
    tried |= {name.rpartition(".")[0] for name in tried}
    tried |= {name.split(".")[-1] for name in tried}
    for name, value in public_names():
        if name.split(".")[-1] not in tried and name not in EXEMPT and not _is_result(value):
            yield name


def _is_result(value: Any) -> bool:
    return inspect.isclass(value) and (is_dataclass(value) or issubclass(value, tuple))


def public_names() -> Iterator[tuple[str, Any]]:
    """Functions and classes of all faces."""
    root = Path(matlens.__file__).parent
    for face in (root / "__init__.pyi", *sorted(root.glob("*/__init__.pyi"))):
        room = "" if face.parent == root else face.parent.name
        module = importlib.import_module(f"matlens.{room}" if room else "matlens")
        for name in re.findall(r"^from \S+ import \w+ as (\w+)", face.read_text(), flags=re.MULTILINE):
            value = getattr(module, name)
            if inspect.isfunction(value) or inspect.isclass(value):
                yield f"{room}.{name}" if room else name, value
