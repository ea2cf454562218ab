"""The command that clusters value vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from matlens.cli.groups import ModelOptions, ReadOptions, grouped
from matlens.cli.options import Disk, LinkageChoice, LinkageOption, Memory, Out
from matlens.cli.printing import print_table
from matlens.storage.numbers import number_text

_N_NAMED = 3  # vectors that are named of each cluster


@grouped
def cluster(
    model: ModelOptions,
    reading: ReadOptions,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Value vectors, such as L3D12, whose clusters to show.", show_default=False),
    ] = None,
    clusters: Annotated[int, typer.Option(min=1, help="How many clusters.")] = 10_000,
    linkage: LinkageOption = LinkageChoice.average,
    memory: Memory = 4.0,
    disk: Disk = 0.0,
    limit: Annotated[int, typer.Option(min=1, help="Without names, show so many, the largest.")] = 20,
    out: Out = Path("out"),
) -> None:
    """Cluster all value vectors by their cosines, and show the largest clusters or those of value vectors.

    The clusters are kept in the output folder, so that the next call has them.
    """
    from matlens.ffn.clusters import cluster_table
    from matlens.ffn.values import ValueVector
    from matlens.study.study import Study

    for name in names or ():  # before the model, which can take minutes
        ValueVector.parse(name)
    catalogue = model.catalogue()
    study = Study(load_model=lambda: catalogue.model, load_values=lambda: catalogue.values, out=out)
    values = study.values
    asked = [values.resolve(name) for name in names or ()]  # and before the work
    projection = reading.projection(catalogue)
    fitted = study.clusters(clusters, linkage=linkage.value, memory=memory, disk=disk)
    chosen = fitted.holding(values, asked) if asked else list(range(min(limit, len(fitted))))
    table = cluster_table(values, projection, fitted, chosen, n_tokens=reading.tokens)
    exact = fitted.method == "exact"
    how = f"exactly, by {fitted.linkage} linkage" if exact else "by near neighbours"
    title = f"{len(values):,} value vectors in {len(fitted):,} clusters, {how}"
    cells = table.assign(
        layers=[
            _layers(first, last)
            for first, last in zip(table["first_layer"], table["last_layer"], strict=True)
        ],
        cosine=[_cosine(cosine) for cosine in table["cosine"]],
        members=[_members(members, [str(vector) for vector in asked]) for members in table["members"]],
    )
    rows = cells[["cluster", "size", "layers", "cosine", "members", "tokens"]].to_numpy().tolist()
    print_table(title, ("cluster", "size", "layers", "cosine", "vectors", "top tokens of their mean"), rows)


def _layers(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _cosine(cosine: float) -> str:
    return "–" if cosine != cosine else number_text(cosine, 2)


def _members(names: str, asked: Sequence[str]) -> str:
    """Those that were asked for, and then a few others."""
    members = names.split()
    named = [name for name in members if name in asked]
    shown = [*named, *(name for name in members if name not in asked)][: max(_N_NAMED, len(named))]
    more = f" +{len(members) - len(shown)}" if len(shown) < len(members) else ""
    return " ".join(shown) + more
