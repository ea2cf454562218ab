"""Lenses on the hub: one repository for many models, a folder for each lens, and a list of them.

The folders are named by model, method and corpus, as in ``neuronpedia/jacobian-lens``, whose files are read
too. ``lenses.json`` lists the lenses; ``README.md`` shows the list, and one in each folder, the card of its
lens, is written from its provenance. A lens is pushed in one commit, onto the one that was read: of two that
push at the same time, one reads again.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pandas as pd

from matlens.errors import InputError, check, checked, printable, short
from matlens.io.artifact import CONFIG
from matlens.io.bounds import parse_json
from matlens.io.numbers import number_text
from matlens.io.repository import HubConflict, HubRepository, HubSnapshot
from matlens.io.tables import COLUMNS, check_columns
from matlens.lens.files import read_jacobian_lens, read_lens, write_lens
from matlens.lens.maps import LensMaps
from matlens.linear.maps import fitted_samples

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

INDEX, CARD = "lenses.json", "README.md"
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_ATTEMPTS = 4
MEASURES: Mapping[tuple[str, int | None], str] = {
    ("r2", None): "r2", ("r2 without sinks", None): "r2 without sinks", ("precision", 1): "Precision@1",
    ("precision", 5): "Precision@5", ("precision", 10): "Precision@10", ("surprisal", None): "surprisal",
    ("kl", None): "KL",
}  # fmt: skip
_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_MARKUP = re.compile(r"([\\`*_\[\]<>|~#])")


@checked
@dataclass(frozen=True)
class LensEntry:
    """The line of a lens in the list of its repository."""

    folder: str
    model: str
    method: str
    corpus: str
    tokens: int | None
    sinks: str
    layers: Sequence[int]
    mean: Mapping[str, float]
    digest: str

    @classmethod
    def from_lens(
        cls, folder: str, lens: LensMaps, quality: Mapping[int, Mapping[str, float]] | None
    ) -> LensEntry:
        """The line of a lens, with its measures averaged over layers."""
        provenance = lens.provenance
        means = pd.DataFrame(list((quality or {}).values())).mean()
        return cls(
            folder, bare(provenance.identity.name), lens.method, bare(provenance.corpus),
            fitted_samples(provenance), sinks_text(lens), list(lens.maps),
            {str(name): value for name, value in means.items() if math.isfinite(value)}, lens.digest,
        )  # fmt: skip


def folder_of(lens: LensMaps) -> str:
    """Where a lens lies in a repository unless it is named: ``model/method/corpus``."""
    parts = (bare(lens.provenance.identity.name), lens.method, bare(lens.provenance.corpus))
    return "/".join(
        re.sub(r"[^A-Za-z0-9._-]+", "-", part.split("/")[-1]).strip("-.") or "-" for part in parts
    )


def push_lens(
    lens: LensMaps,
    repository: HubRepository,
    *,
    name: str | None = None,
    quality: pd.DataFrame | None = None,
    private: bool = False,
) -> str:
    """Put a lens into a repository; see `Lens.push_to_hub`."""
    folder = folder_of(lens) if name is None else _check_folder(name)
    measures = None if quality is None else quality_of(lens.method, quality)
    with tempfile.TemporaryDirectory(prefix="matlens-lens-") as place:
        written = Path(place) / "lens"
        write_lens(written, lens)
        of_lens: dict[str, bytes | Path] = {
            f"{folder}/{path.name}": path
            for path in sorted(written.iterdir())
            if path.name == CONFIG or path.suffix == ".safetensors"
        }
        of_lens[f"{folder}/{CARD}"] = lens_card(lens, measures).encode()
        for _ in range(_ATTEMPTS):
            onto = repository.snapshot(absent=True)
            entries = [entry for entry in _entries(repository, onto) if entry.folder != folder]
            entries.append(LensEntry.from_lens(folder, lens, measures))
            entries.sort(key=lambda entry: entry.folder)
            files: dict[str, bytes | Path] = {
                **of_lens,
                INDEX: (json.dumps(list(map(asdict, entries)), indent=1) + "\n").encode(),
                CARD: repository_card(repository.name, entries).encode(),
            }
            try:
                return repository.commit(
                    files, message=f"Add {folder} with matlens", onto=onto, private=private
                )
            except HubConflict:
                continue
    raise InputError(
        f"Others write to {repository.name} all the time: {_ATTEMPTS} attempts came too late. Try again "
        "later."
    )


def pull_lens(
    repository: HubRepository,
    name: str | None = None,
    *,
    revision: str | None = None,
    model: TransformerBridge | None = None,
) -> LensMaps:
    """Read a lens out of a repository; see `Lens.from_pretrained`."""
    snapshot = repository.snapshot(revision)
    assert snapshot.commit is not None
    known = sorted(
        str(PurePosixPath(path).parent)
        for path in snapshot.files
        if PurePosixPath(path).name == CONFIG and len(PurePosixPath(path).parts) > 1
    )
    files = [path for path in snapshot.files if path.endswith(".pt")]
    if name is None and len(known) == 1:
        name = known[0]
    if name in files and model is None:
        raise InputError(
            f"{name} is a file of TransformerLens' JacobianLens, which does not say which model it is of. "
            "Give the model."
        )
    if name in files and name is not None and model is not None:
        lens = read_jacobian_lens(repository.download(name, snapshot.commit), model)
    elif name in known and name is not None:
        inside = [path for path in snapshot.files if str(PurePosixPath(path).parent) == name]
        wanted = [path for path in inside if path.endswith((f"/{CONFIG}", ".safetensors"))]
        places = {repository.download(path, snapshot.commit).parent for path in wanted}
        lens = read_lens(places.pop())
    else:
        raise InputError(
            f"{repository.name} has no lens {short(name)}. Expected one of {short([*known, *files])}."
        )
    of_hub = {"repository": repository.name, "commit": snapshot.commit, "name": name}
    return replace(lens, provenance=lens.provenance.with_details(hub=of_hub))


def _entries(repository: HubRepository, snapshot: HubSnapshot) -> list[LensEntry]:
    """The list of lenses that a repository has by now."""
    if snapshot.commit is None or INDEX not in snapshot.files:
        return []
    path = repository.download(INDEX, snapshot.commit)
    entries = parse_json(path.read_text(encoding="utf-8", errors="replace"), f"{INDEX} of {repository.name}")
    try:
        check(entries, Sequence[Mapping[str, Any]], INDEX)
        known = [field.name for field in fields(LensEntry)]
        return [LensEntry(**{name: entry.get(name) for name in known}) for entry in entries]
    except (TypeError, InputError) as error:
        raise InputError(
            f"{INDEX} of {repository.name} is no list of lenses as matlens writes it ({error}). Push to "
            "another repository, or mend the file."
        ) from error


def _check_folder(name: str) -> str:
    parts = name.split("/")
    if not 1 <= len(parts) <= 5 or not all(_PART.fullmatch(part) for part in parts):
        raise InputError(
            f"{short(name)} cannot name a folder of a repository. Expected letters, digits, dots and dashes "
            "with slashes between, such as 'smollm2-135m/mat/wikipedia'."
        )
    return name


# Cards


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
    for row in rows.dropna(subset="value").to_dict("records"):
        name = MEASURES.get((row["metric"], None if pd.isna(row["k"]) else int(row["k"])))
        if name is not None:
            quality.setdefault(int(row["layer"]), {})[name] = float(row["value"])
    if not quality:
        known = sorted(set(results["method"].astype(str)))
        raise InputError(f"The table has no number of {short(method)}. It has those of {short(known)}.")
    return quality


def bare(name: str) -> str:
    """A name that says nothing of the machine that it was given on: of a path its last part."""
    absolute = name.startswith((".", "/", "~")) or "\\" in name
    return re.split(r"[\\/]", name.rstrip("\\/"))[-1] if absolute else name


def sinks_text(lens: LensMaps) -> str:
    """Whether attention sinks were among the tokens that it was fitted on."""
    if lens.method == "id":
        return "–"
    n = lens.provenance.details.get("n_sinks")
    if lens.method.endswith(" without sinks"):
        return "out" if n is None else f"out ({n:,})"
    return "in"


def repository_card(name: str, entries: Sequence[LensEntry]) -> str:
    """README of a repository of lenses."""
    models = sorted({entry.model for entry in entries if _ON_HUB.fullmatch(entry.model)})
    base = ["base_model:", *(f"- {model}" for model in models)] if models else []
    heads = ("lens", "model", "method", "corpus", "tokens", "sinks", "layers", "r2", "Precision@1")
    rows = [
        (
            f"[{_plain(entry.folder)}]({entry.folder})", _plain(entry.model), _plain(entry.method),
            _plain(entry.corpus), _whole(entry.tokens), _plain(entry.sinks), _ranges(entry.layers),
            *(_measure(entry.mean, measure) for measure in ("r2", "Precision@1")),
        )
        for entry in entries
    ]  # fmt: skip
    lines = [
        "---", "library_name: matlens", "tags:", "- matlens", "- logit-lens", "- interpretability", *base,
        "---", "",
        f"# Lenses: {_plain(name)}", "",
        "A lens is a map for each layer of a model that carries its vectors to the last layer, where the "
        "model's own read-out makes tokens of them. Each folder is one lens: `config.json` and safetensors. "
        "Measures are means over the layers that were judged.", "",
        *_table(heads, rows), "",
        "```python", "from matlens import Lens, load", "",
        f"model = load({_quoted(entries[0].model)})",
        f"lens = Lens.from_pretrained({_quoted(name)}, {_quoted(entries[0].folder)}, model, "
        'revision="...")  # a commit of this repository',
        'lens.trajectory("The Eiffel Tower stands in the city of").plot()', "```", "",
    ]  # fmt: skip
    return "\n".join(lines)


def lens_card(lens: LensMaps, quality: Mapping[int, Mapping[str, float]] | None) -> str:
    """README of one lens: what it was fitted on, and how well it reads each layer."""
    provenance, identity = lens.provenance, lens.provenance.identity
    data, details = provenance.data or {}, provenance.details
    tokens = fitted_samples(provenance)
    facts = [
        ("model", f"{_plain(bare(identity.name))}, revision {_plain(identity.revision or 'unnamed')}"),
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
    lines = [f"# {_plain(lens.method)} of {_plain(bare(identity.name))}", "", *_table(("", ""), facts), ""]
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
