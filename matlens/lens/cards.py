"""What a repository says of its lenses: a line for each, and a card that is written from its provenance."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from matlens.errors import InputError, printable, short
from matlens.io.numbers import number_text
from matlens.io.tables import COLUMNS, check_columns
from matlens.lens.maps import LensParts
from matlens.linear.maps import fitted_samples
from matlens.models.identity import ModelIdentity

MEASURES: Mapping[tuple[str, int | None], str] = {
    ("r2", None): "r2", ("r2 without sinks", None): "r2 without sinks", ("precision", 1): "Precision@1",
    ("precision", 5): "Precision@5", ("precision", 10): "Precision@10", ("surprisal", None): "surprisal",
    ("kl", None): "KL",
}  # fmt: skip
_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_MARKUP = re.compile(r"([\\`*_\[\]<>|~#])")


def quality_of(method: str, results: pd.DataFrame) -> dict[int, dict[str, float]]:
    """Measures of a lens by layer, from a table of results, such as that of `lens.report_table`.

    Raises
    ------
    InputError
        It is no table of results, or has no number of this method at a layer.
    """
    check_columns(results, COLUMNS, what="the table of lens.report_table or lens.prediction_quality")
    rows = results[(results["method"] == method) & results["layer"].notna()]
    if "against" in rows:
        rows = rows[rows["against"].isna() | (rows["against"].astype(str) == "")]
    quality: dict[int, dict[str, float]] = {}
    for row in rows.to_dict("records"):
        name = MEASURES.get((str(row["metric"]), None if pd.isna(row["k"]) else int(row["k"])))
        if name is not None and float(row["value"]) == float(row["value"]):
            quality.setdefault(int(row["layer"]), {})[name] = float(row["value"])
    if not quality:
        known = sorted(set(results["method"].astype(str)))
        raise InputError(f"The table has no number of {short(method)}. It has those of {short(known)}.")
    return quality


def lens_entry(
    folder: str, lens: LensParts, quality: Mapping[int, Mapping[str, float]] | None
) -> dict[str, Any]:
    """The line of a lens in the list of its repository, as JSON."""
    provenance, identity = lens.provenance, lens.provenance.identity
    mean = {
        name: sum(values) / len(values)
        for name in MEASURES.values()
        if (values := [of_layer[name] for of_layer in (quality or {}).values() if name in of_layer])
    }
    return {
        "folder": folder, "model": bare_name(identity), "method": lens.method,
        "corpus": bare(provenance.corpus), "tokens": fitted_samples(provenance), "sinks": sinks_text(lens),
        "layers": list(lens.maps), "mean": mean, "digest": lens.digest,
    }  # fmt: skip


def bare(name: str) -> str:
    """A name that says nothing of the machine that it was given on: of a path its last part."""
    absolute = name.startswith((".", "/", "~")) or "\\" in name
    return re.split(r"[\\/]", name.rstrip("\\/"))[-1] if absolute else name


def bare_name(identity: ModelIdentity) -> str:
    """The model's name, without folders of this machine."""
    return bare(identity.name)


def sinks_text(lens: LensParts) -> str:
    """Whether attention sinks were among the tokens that it was fitted on."""
    if lens.method == "id":
        return "–"
    n = lens.provenance.details.get("n_sinks")
    if lens.method.endswith(" without sinks"):
        return "out" if n is None else f"out ({n:,})"
    return "in"


def repository_card(name: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """README of a repository of lenses."""
    models = sorted({entry["model"] for entry in entries if _ON_HUB.fullmatch(str(entry["model"]))})
    base = ["base_model:", *(f"- {model}" for model in models)] if models else []
    heads = ("lens", "model", "method", "corpus", "tokens", "sinks", "layers", "r2", "Precision@1")
    rows = [
        (
            f"[{_plain(entry['folder'])}]({entry['folder']})", _plain(entry["model"]),
            _plain(entry["method"]), _plain(entry["corpus"]), _whole(entry["tokens"]), _plain(entry["sinks"]),
            _ranges(entry["layers"]),
            *(_measure(entry["mean"], measure) for measure in ("r2", "Precision@1")),
        )
        for entry in entries
    ]  # fmt: skip
    example = entries[0]
    lines = [
        "---", "library_name: matlens", "tags:", "- matlens", "- logit-lens", "- interpretability", *base,
        "---", "",
        f"# Lenses: {_plain(name)}", "",
        "A lens is a map for each layer of a model that carries its vectors to the last layer, where the "
        "model's own read-out makes tokens of them. Each folder is one lens: `config.json` and safetensors. "
        "Measures are means over the layers that were judged.", "",
        *_table(heads, rows), "",
        "```python", "from matlens import Lens, load", "",
        f"model = load({_quoted(example['model'])})",
        f"lens = Lens.from_pretrained({_quoted(name)}, {_quoted(example['folder'])}, model, "
        'revision="...")  # a commit of this repository',
        'lens.trajectory("The Eiffel Tower stands in the city of").plot()', "```", "",
    ]  # fmt: skip
    return "\n".join(lines)


def lens_card(lens: LensParts, quality: Mapping[int, Mapping[str, float]] | None) -> str:
    """README of one lens: what it was fitted on, and how well it reads each layer."""
    provenance, identity = lens.provenance, lens.provenance.identity
    data, details = provenance.data or {}, provenance.details
    tokens = fitted_samples(provenance)
    facts = [
        ("model", f"{_plain(bare_name(identity))}, revision {_plain(identity.revision or 'unnamed')}"),
        ("weights", f"fingerprint {_plain(identity.fingerprint)}, {_plain(identity.dtype)}"),
        ("text becomes tokens", _plain(identity.token_policy)),
        ("corpus", f"{_plain(bare(provenance.corpus))}, {_whole(data.get('n'))} sentences"),
        ("fitted on", "nothing" if lens.method == "id" else f"{_whole(tokens)} tokens"),
        ("positions", _plain(str(provenance.positions or "–"))),
        ("attention sinks", sinks_text(lens)),
        ("seed", _plain(str(details.get("seed", data.get("seed", "–"))))),
        ("norm before the map", "none" if lens.norm is None else _plain(lens.norm.kind)),
        ("layers", f"{_ranges(list(lens.maps))} of {identity.n_layers}, each onto the last"),
        ("digest", lens.digest),
    ]
    lines = [f"# {_plain(lens.method)} of {_plain(bare_name(identity))}", "", *_table(("", ""), facts), ""]
    if quality:
        names = [name for name in MEASURES.values() if any(name in values for values in quality.values())]
        rows = [
            (str(layer), *(_measure(values, name) for name in names))
            for layer, values in sorted(quality.items())
        ]
        lines += ["On tokens that it was not fitted on:", "", *_table(("layer", *names), rows), ""]
    else:
        lines += ["How well it reads has not been measured.", ""]
    return "\n".join(lines)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def _plain(text: Any) -> str:
    """Foreign text that is shown in a line of Markdown and does nothing else."""
    return _MARKUP.sub(r"\\\1", printable(str(text), most=200))


def _quoted(text: Any) -> str:
    return '"' + printable(str(text)).replace("\\", "\\\\").replace('"', '\\"').replace("`", "'") + '"'


def _whole(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) else "–"


def _measure(values: Mapping[str, float], name: str) -> str:
    return number_text(values[name]) if name in values else "–"


def _ranges(layers: Sequence[int]) -> str:
    """Layers in a few characters: ``0-3, 7``."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], layer]
        else:
            parts.append([layer])
    return ", ".join("-".join(map(str, part)) for part in parts)
